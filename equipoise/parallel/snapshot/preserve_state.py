"""Run a piece of work with a module and restore all state afterwards.

Restored to the bit: the attributes of submodules and samplers, training modes among them; buffers and metrics; the
generators of torch on all devices, of Python and of numpy; and the generators in attributes of the module, a loader,
its samplers, its data and their transforms. Parameters and gradients are not restored: nothing here changes them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from equipoise.parallel.snapshot import random_state
from equipoise.parallel.snapshot.attributes import Attributes, Containers
from equipoise.parallel.snapshot.buffers import Buffers
from equipoise.parallel.snapshot.generators import find_generators, linked, restorer, samplers_of
from equipoise.parallel.snapshot.metrics import Metrics

__all__ = ["preserve_state"]


@contextmanager
def preserve_state(module: nn.Module, *holders: Any, containers: bool = False) -> Iterator[None]:
    """Restore the state of a module, of loaders and of all random generators at the end of a `with` block.

    An object in an attribute may still be changed in place, as by `self.outputs.append(...)`: that stays. Buffers are
    copied, on their device, until the end.

    Args:
        module: The module.
        holders: Loaders and the like. The attributes of their samplers are restored, and all generators that
            `find_generators` finds in loaders, samplers, data and transforms.
        containers: Restore the contents of lists, dictionaries, sets and deques in public attributes of the module,
            too. Default: False.

    Example:
        >>> import torch
        >>> module = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval())
        >>> with preserve_state(module):
        ...     noise = module.eval()(torch.rand(3, 2))
        >>> [part.training for part in module]
        [True, False]
    """
    parts = list(module.modules())
    state: list[Any] = [
        _ModuleAttributes(parts),
        # A sampler may count its epochs.
        Attributes(samplers_of(holders)),
        Buffers(module),
        Metrics(module),
    ]
    if containers:
        # First, while the attributes may still name other objects.
        state.insert(0, Containers(module))
    with random_state.isolated():
        for part in state:
            part.mark()
        generators = find_generators(parts, depth=1)
        generators += find_generators(linked(holders))
        restore_generators = [restorer(generator) for generator in generators]
        try:
            yield
        finally:
            for part in state:
                part.restore()
            for restore in restore_generators:
                restore()


class _ModuleAttributes(Attributes):
    """Notes the training modes and attributes of modules, and restores them."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__(modules)
        self._modules = modules
        self._modes: list[bool] = []

    def mark(self) -> None:
        super().mark()
        self._modes = [module.training for module in self._modules]

    def restore(self) -> None:
        # 1. An override may do more than set the mode: it may separate weights that it merged for an evaluation.
        for module, mode in zip(self._modules, self._modes, strict=True):
            overrides_train = type(module).train is not nn.Module.train
            if overrides_train and module.training != mode:
                module.train(mode)
        # 2. The attributes; a scripted module has its mode outside of them.
        super().restore()
        for module, mode in zip(self._modules, self._modes, strict=True):
            module.training = mode
