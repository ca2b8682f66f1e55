"""Run a piece of work with a module and restore all state afterwards.

Restored to the bit: the attributes of submodules and samplers, training modes among them; buffers and metrics; the
generators of torch on all devices, of Python and of numpy; and the generators in attributes of the module, a loader,
its samplers, its data and their transforms. Parameters and gradients are not restored: nothing here changes them.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from equipoise.parallel.snapshot import random_state
from equipoise.parallel.snapshot.generators import find_generators, linked, restorer, samplers_of
from equipoise.parallel.snapshot.step_snapshot import StepSnapshot

__all__ = ["preserve_state"]


@contextmanager
def preserve_state(module: nn.Module, *holders: Any) -> Iterator[None]:
    """Restore the state of a module, of loaders and of all random generators at the end of a `with` block.

    An object in an attribute may still be changed in place, as by `self.outputs.append(...)`: that stays. Buffers are
    copied, on their device, until the end.

    Args:
        module: The module.
        holders: Loaders and the like. The attributes of their samplers are restored, and all generators that
            `find_generators` finds in loaders, samplers, data and transforms.

    Example:
        >>> import torch
        >>> module = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval())
        >>> with preserve_state(module):
        ...     noise = module.eval()(torch.rand(3, 2))
        >>> [part.training for part in module]
        [True, False]
    """
    parts = list(module.modules())
    modules = []
    for part in parts:
        attributes = dict(vars(part))
        modules.append((part, part.training, attributes))
    # A sampler may count its epochs.
    samplers = []
    for sampler in samplers_of(holders):
        attributes = dict(vars(sampler))
        samplers.append((sampler, attributes))
    snapshot = StepSnapshot(module, ())
    with random_state.isolated():
        snapshot.mark()
        generators = find_generators(parts, depth=1)
        generators += find_generators(linked(holders))
        restore_generators = [restorer(generator) for generator in generators]
        try:
            yield
        finally:
            _restore_modules(modules)
            for sampler, attributes in samplers:
                _restore_attributes(sampler, attributes)
            snapshot.restore()
            for restore in restore_generators:
                restore()


def _restore_modules(modules: Iterable[tuple[nn.Module, bool, dict[str, Any]]]) -> None:
    """Restore the training modes and attributes of modules."""
    # 1. An override may do more than set the mode: it may separate weights that it merged for an evaluation.
    for module, mode, _ in modules:
        overrides_train = type(module).train is not nn.Module.train
        if overrides_train and module.training != mode:
            module.train(mode)
    # 2. A scripted module has its mode outside of its attributes.
    for module, mode, attributes in modules:
        _restore_attributes(module, attributes)
        module.training = mode


def _restore_attributes(holder: Any, attributes: dict[str, Any]) -> None:
    present = vars(holder)
    added = present.keys() - attributes.keys()
    for name in added:
        del present[name]
    present.update(attributes)
