"""Run a piece of work with a module and restore all state afterwards.

Put back, to the bit: the attributes of submodules and samplers, training modes among them; buffers and metrics; torch's
generators on all devices, Python's and numpy's; and the generators that the module, a loader, its samplers, its data
and their transforms hold for themselves. Parameters and gradients are left alone: nothing here changes them.
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
    """What is done inside leaves no trace in a module, in what holds generators, and in no random generator.

    What an attribute refers to may still be changed in place, as by `self.seen.append(...)`: that stays. Buffers are
    copied for the time being, on their device.

    Args:
        module: The module.
        holders: Loaders and the like. The attributes of their samplers are put back, and their generators, those of
            samplers, data and transforms among them, as far as `find_generators` finds them.

    Example:
        >>> import torch
        >>> module = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval())
        >>> with preserve_state(module):
        ...     noise = module.eval()(torch.rand(3, 2))
        >>> [part.training for part in module]
        [True, False]
    """
    parts = list(module.modules())
    before = [(part, part.training, dict(vars(part))) for part in parts]
    samplers = [(sampler, dict(vars(sampler))) for sampler in samplers_of(holders)]
    rewind = StepSnapshot(module, ())
    with random_state.isolated():
        rewind.mark()
        generators = [*find_generators(parts, depth=1), *find_generators(linked(holders))]
        restore_generators = [restorer(each) for each in generators]
        try:
            yield
        finally:
            _restore_parts(before)
            for sampler, attributes in samplers:  # one may count its epochs
                _restore_attributes(sampler, attributes)
            rewind.restore()
            for restore in restore_generators:
                restore()


def _restore_parts(before: Iterable[tuple[nn.Module, bool, dict[str, Any]]]) -> None:
    for part, mode, _ in before:
        # An override may do more than set the mode: weights that are merged for an evaluation are parted again.
        if type(part).train is not nn.Module.train and part.training != mode:
            part.train(mode)
    for part, mode, attributes in before:
        _restore_attributes(part, attributes)
        part.training = mode  # a scripted module keeps it elsewhere


def _restore_attributes(holder: Any, attributes: dict[str, Any]) -> None:
    for name in [name for name in vars(holder) if name not in attributes]:
        del vars(holder)[name]
    vars(holder).update(attributes)
