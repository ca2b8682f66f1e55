"""Random generators in the attributes of loaders, samplers and data sets."""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MethodType, ModuleType
from typing import Any

import torch

__all__ = [
    "find_generators",
    "generator_state",
    "is_generator",
    "linked",
    "restorer",
    "samplers_of",
    "set_generator_state",
]

# Attributes of a loader or batch sampler.
_SAMPLERS = ("batch_sampler", "sampler")
_LINKS = (*_SAMPLERS, "dataset", "loader")
# Steps from an object to a generator. An attribute and an item are one step each:
# dataset.transform.transforms[0].transforms[0].generator, for instance.
_DEPTH = 6
# Items of a list or dictionary. Longer ones are data, not transforms.
_LONGEST = 64
# Number of objects that are examined, nearer ones first.
_MOST_OBJECTS = 10_000
# Types without generators inside.
_LEAVES = (
    str,
    bytes,
    int,
    float,
    complex,
    torch.Tensor,
    type,
    ModuleType,
)


def linked(holders: Iterable[Any]) -> Iterator[Any]:
    """Yield loaders and the like, with their samplers and data, each once.

    Data include the parts of composed data.

    Args:
        holders: Loaders, samplers or data sets.
    """
    waiting = list(holders)
    visited = set()
    while waiting:
        holder = waiting.pop()
        if holder is None or id(holder) in visited:
            continue
        visited.add(id(holder))
        yield holder
        # A subset has a `dataset`, too.
        waiting.extend(getattr(holder, link, None) for link in _LINKS)
        # The parts of a ConcatDataset.
        parts = getattr(holder, "datasets", None)
        if isinstance(parts, Mapping):
            waiting.extend(parts.values())
        elif isinstance(parts, (list, tuple)):
            waiting.extend(parts)


def samplers_of(holders: Iterable[Any]) -> list[Any]:
    """Return the samplers and batch samplers of loaders and the like, each once."""
    samplers: dict[int, Any] = {}
    for holder in linked(holders):
        for link in _SAMPLERS:
            sampler = getattr(holder, link, None)
            if hasattr(sampler, "__dict__"):
                samplers[id(sampler)] = sampler
    return list(samplers.values())


def find_generators(holders: Iterable[Any], depth: int = _DEPTH) -> list[Any]:
    """Return the generators in the attributes of objects, and in the attributes of those, each once.

    Lists, tuples, dictionaries, the objects of bound methods and the arguments of partial functions are examined as
    well, if they have at most 64 items. Generators in closures and slots are not found.

    Args:
        holders: The objects to examine.
        depth: The largest number of steps. An attribute and an item are one step each. Default: 6.

    Returns:
        Generators of torch, numpy and Python.

    Example:
        >>> class Flip:
        ...     def __init__(self): self.generator = random.Random(1)
        >>> class Data:
        ...     def __init__(self): self.transforms = [Flip()]
        >>> len(find_generators([Data()]))
        1
    """
    types = _generator_types()
    generators: dict[int, Any] = {}
    for holder in holders:
        for generator in _search(holder, types, depth):
            generators[id(generator)] = generator
    return list(generators.values())


def _generator_types() -> tuple[type, ...]:
    types: list[type] = [torch.Generator, random.Random]
    # Without an import of numpy there are none of its generators.
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        types += [numpy.Generator, numpy.RandomState]
    return tuple(types)


def _search(holder: Any, types: tuple[type, ...], depth: int) -> Iterator[Any]:
    """Yield the generators of these types near an object, breadth first."""
    visited: set[int] = set()
    waiting = deque([(holder, 0)])
    while waiting and len(visited) < _MOST_OBJECTS:
        value, steps = waiting.popleft()
        if value is None or isinstance(value, _LEAVES):
            continue
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, types):
            # A SystemRandom has no state.
            if not isinstance(value, random.SystemRandom):
                yield value
        elif steps < depth:
            for neighbour in _neighbours_of(value):
                waiting.append((neighbour, steps + 1))


def _neighbours_of(value: Any) -> Iterable[Any]:
    """Return the objects one step away: items, attributes, and the parts of methods and partial functions."""
    if isinstance(value, (list, tuple, dict)) and len(value) > _LONGEST:
        return ()
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    try:
        # Runs no property and no code of a proxy.
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return ()
    if not isinstance(attributes, dict):
        return ()
    return list(attributes.values())


def is_generator(value: Any) -> bool:
    """Return True for a generator that has a state."""
    return isinstance(value, _generator_types()) and not isinstance(value, random.SystemRandom)


def generator_state(generator: Any) -> Any:
    """Return the present state of a generator, as plain data."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def set_generator_state(generator: Any, state: Any) -> None:
    """Set a generator back to a state that `generator_state` returned."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def restorer(generator: Any) -> Callable[[], Any]:
    """Return a function that restores the present state of a generator."""
    return partial(set_generator_state, generator, generator_state(generator))
