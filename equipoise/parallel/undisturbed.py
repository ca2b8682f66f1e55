"""A piece of work with a module, after which everything is as if it had never been done.

Put back, to the bit: the attributes of every submodule, their training modes among them; buffers and metrics; torch's
generators on all devices, Python's and numpy's; and the generators that the module, a loader, its samplers and its data
hold for themselves. Parameters and gradients are left alone: nothing here changes them.
"""

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from equipoise.parallel import random_state
from equipoise.parallel.rewind import Rewind

__all__ = ["undisturbed"]

_LINKS = ("batch_sampler", "sampler", "dataset")  # of a loader, a batch sampler, a subset of data


@contextmanager
def undisturbed(module: nn.Module, *holders: Any) -> Iterator[None]:
    """What is done inside leaves no trace in a module, in what holds generators, and in no random generator.

    What an attribute refers to may still be changed in place, as by `self.seen.append(...)`: that stays. Buffers are
    copied for the time being, on their device.

    Args:
        module: The module.
        holders: Loaders and the like, whose generators, those of their samplers and of their data are put back.

    Example:
        >>> module = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval())
        >>> with undisturbed(module):
        ...     noise = module.eval()(torch.rand(3, 2))
        >>> [part.training for part in module]
        [True, False]
    """
    parts = list(module.modules())
    before = [(part, part.training, dict(vars(part))) for part in parts]
    rewind = Rewind(module, ())
    with random_state.isolated():
        rewind.mark()
        restore_generators = [_restorer(each) for each in _generators((*parts, *_chain(holders)))]
        try:
            yield
        finally:
            _restore_parts(before)
            rewind.restore()
            for restore in restore_generators:
                restore()


def _restore_parts(before: Iterable[tuple[nn.Module, bool, dict[str, Any]]]) -> None:
    for part, mode, _ in before:
        # An override may do more than set the mode: weights that are merged for an evaluation are parted again.
        if type(part).train is not nn.Module.train and part.training != mode:
            part.train(mode)
    for part, mode, attributes in before:
        for name in [name for name in vars(part) if name not in attributes]:
            del vars(part)[name]
        vars(part).update(attributes)
        part.training = mode  # a scripted module keeps it elsewhere


def _chain(holders: Iterable[Any]) -> Iterator[Any]:
    """Everything that may hold a generator, each once."""
    waiting, seen = list(holders), set()
    while waiting:
        holder = waiting.pop()
        if holder is not None and id(holder) not in seen:
            seen.add(id(holder))
            yield holder
            waiting += [getattr(holder, link, None) for link in _LINKS]


def _generators(holders: Iterable[Any]) -> list[Any]:
    """The generators that are attributes of something, each once."""
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if (numpy := sys.modules.get("numpy.random")) is not None:
        kinds = (*kinds, numpy.Generator, numpy.RandomState)
    held = (value for holder in holders for value in getattr(holder, "__dict__", {}).values())
    return list({id(value): value for value in held if isinstance(value, kinds)}.values())


def _restorer(generator: Any) -> Callable[[], Any]:
    """A function that sets a generator back to where it is now."""
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
        return lambda: generator.set_state(state)
    if isinstance(generator, random.Random):
        words = generator.getstate()
        return lambda: generator.setstate(words)
    if hasattr(generator, "bit_generator"):
        bits, before = generator.bit_generator, generator.bit_generator.state
        return lambda: setattr(bits, "state", before)
    legacy = generator.get_state(legacy=False)
    return lambda: generator.set_state(legacy)
