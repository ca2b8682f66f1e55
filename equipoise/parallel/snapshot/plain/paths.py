"""Paths: the attributes and items that lead from a named object to what it holds."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn
from torch.utils.data import Dataset, Sampler

from equipoise.parallel.snapshot.plain.values import LARGEST

__all__ = ["Path", "Root", "Step", "entry_of", "find", "steps_from", "text_of"]

# A step is the name of an attribute, or a list with the key of an item.
Step = Any
# The name of a root, and the steps from there.
Path = tuple[Step, ...]

# Packages whose objects are not followed: they hold what is created anew, and have states of their own.
_NOT_FOLLOWED = frozenset({"torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "equipoise"})
# Longer containers are data, unless all of their items are plain.
_MOST_ITEMS = 1000


class Root(NamedTuple):
    """An object that is followed.

    Attributes:
        value: The object.
        left_out: Names of attributes that are not followed.
        objects_only: Whether its plain values and generators are left out.
        largest: Bytes of a value up to which it is noted.
    """

    value: Any
    left_out: frozenset[str] = frozenset()
    objects_only: bool = False
    largest: int = LARGEST


def steps_from(value: Any) -> list[tuple[Step, Any]] | None:
    """Return items or attributes of a value, with the steps to them; None if it is not followed."""
    if isinstance(value, dict | list | tuple):
        return _items_of(value)
    # These are followed, whoever has written their classes.
    if isinstance(value, nn.Module | Dataset | Sampler | SimpleNamespace):
        return _attributes_of(value)
    package = type(value).__module__.split(".")[0]
    if package in _NOT_FOLLOWED or package in sys.stdlib_module_names:
        return None
    return _attributes_of(value)


def _items_of(container: Any) -> list[tuple[Step, Any]] | None:
    if len(container) > _MOST_ITEMS:
        return None
    items: Iterable[tuple[Any, Any]] = enumerate(container)
    if isinstance(container, dict):
        items = container.items()
    # A path in a file holds plain keys.
    return [([key], item) for key, item in items if isinstance(key, str | int)]


def _attributes_of(value: Any) -> list[tuple[Step, Any]] | None:
    try:
        # Runs no property and no code of a proxy.
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    # The namespace of a class is no dictionary, and is not state.
    if not isinstance(attributes, dict):
        return None
    return list(attributes.items())


def entry_of(owner: Any, step: Step) -> tuple[Any, Any]:
    """Return the container into which a step from an object leads, and the key there."""
    if isinstance(step, list):
        return owner, step[0]
    return vars(owner), step


def find(roots: Mapping[str, Root], path: Sequence[Step]) -> Any:
    """Return the object at a path; None if there is none."""
    name, *steps = path
    if name not in roots:
        return None
    value = roots[name].value
    for step in steps:
        try:
            container, key = entry_of(value, step)
            value = container[key]
        # Objects without attributes and values without items raise the second one.
        except (LookupError, TypeError):
            return None
    return value


def text_of(path: Sequence[Step]) -> str:
    """Return a path as the user would write it."""
    name, *steps = path
    text = str(name)
    for step in steps:
        if isinstance(step, list):
            text += f"[{step[0]!r}]"
        else:
            text += f".{step}"
    return text
