"""Random generators that loaders, samplers and data sets hold for themselves."""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MethodType, ModuleType
from typing import Any

import torch

__all__ = ["find_generators", "linked", "restorer", "samplers_of"]

_SAMPLERS = ("batch_sampler", "sampler")  # of a loader, a batch sampler
_DEPTH = 6  # dataset.transform.transforms[0].transforms[0].generator, say: an attribute, an item, each is one
_LENGTH = 64  # of a list or dictionary; longer ones are data, not transforms
_MOST = 10_000  # things that are looked at, nearer ones first
_LEAVES = (str, bytes, int, float, complex, torch.Tensor, type, ModuleType)


def linked(holders: Iterable[Any]) -> Iterator[Any]:
    """Loaders and the like, with their samplers and data, the parts of composed data among them, each once."""
    waiting, seen = list(holders), set()
    while waiting:
        holder = waiting.pop()
        if holder is not None and id(holder) not in seen:
            seen.add(id(holder))
            yield holder
            waiting += [getattr(holder, link, None) for link in (*_SAMPLERS, "dataset")]  # or that of a subset
            parts = getattr(holder, "datasets", None)  # of a ConcatDataset
            waiting += (
                parts.values() if isinstance(parts, Mapping) else parts if isinstance(parts, (list, tuple)) else ()
            )


def samplers_of(holders: Iterable[Any]) -> list[Any]:
    """The samplers and batch samplers of loaders and the like, each once."""
    linked_to = (getattr(holder, link, None) for holder in linked(holders) for link in _SAMPLERS)
    return list({id(sampler): sampler for sampler in linked_to if hasattr(sampler, "__dict__")}.values())


def find_generators(holders: Iterable[Any], depth: int = _DEPTH) -> list[Any]:
    """The generators in the attributes of something, and in what those hold, each once.

    Lists, tuples, dictionaries, the objects of bound methods and the arguments of partial functions are looked into as
    well, those of more than 64 items excepted. What closures and slots hold is not found.

    Args:
        holders: Where to look.
        depth: How many steps away, an attribute or an item being one each. Default: 6.

    Returns:
        Those of torch and numpy, and Python's.

    Example:
        >>> class Flip:
        ...     def __init__(self): self.generator = random.Random(1)
        >>> class Data:
        ...     def __init__(self): self.transforms = [Flip()]
        >>> len(find_generators([Data()]))
        1
    """
    kinds = _kinds()
    found = (each for holder in holders for each in _walk(holder, kinds, depth))
    return list({id(each): each for each in found}.values())


def _kinds() -> tuple[type, ...]:
    if (numpy := sys.modules.get("numpy.random")) is None:  # then there are none of its
        return (torch.Generator, random.Random)
    return (torch.Generator, random.Random, numpy.Generator, numpy.RandomState)


def _walk(holder: Any, kinds: tuple[type, ...], depth: int) -> Iterator[Any]:
    seen: set[int] = set()
    waiting = deque([(holder, 0)])
    while waiting and len(seen) < _MOST:
        value, steps = waiting.popleft()
        if value is None or isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, kinds):
            if not isinstance(value, random.SystemRandom):  # which has no state
                yield value
        elif steps < depth:
            waiting.extend((each, steps + 1) for each in _held(value))


def _held(value: Any) -> Iterable[Any]:
    """What an object refers to, as far as it is looked into."""
    if isinstance(value, (list, tuple)):
        return value if len(value) <= _LENGTH else ()
    if isinstance(value, dict):
        return list(value.values()) if len(value) <= _LENGTH else ()
    if isinstance(value, MethodType):
        return (value.__self__,)
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    try:
        attributes = object.__getattribute__(value, "__dict__")  # no property, no proxy is asked
    except AttributeError:
        return ()
    return list(attributes.values()) if isinstance(attributes, dict) else ()


def restorer(generator: Any) -> Callable[[], Any]:
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
