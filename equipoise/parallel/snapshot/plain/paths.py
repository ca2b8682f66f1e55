"""Paths: the attributes and items that lead from a named object to what it holds."""

import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from types import MemberDescriptorType, SimpleNamespace
from typing import Any, NamedTuple

from torch import nn
from torch.utils.data import Dataset, Sampler

from equipoise.parallel.snapshot.plain.values import LARGEST

__all__ = ["Path", "Root", "Step", "attributes_of", "slots_of", "steps_from"]

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
    if isinstance(value, dict | list | tuple | deque):
        return _items_of(value)
    # These are followed, whoever has written their classes.
    if isinstance(value, nn.Module | Dataset | Sampler | SimpleNamespace | Namespace):
        return attributes_of(value)
    package = type(value).__module__.split(".")[0]
    if package in _NOT_FOLLOWED or package in sys.stdlib_module_names:
        return None
    return attributes_of(value)


def _items_of(container: Any) -> list[tuple[Step, Any]] | None:
    if len(container) > _MOST_ITEMS:
        return None
    items: Iterable[tuple[Any, Any]] = enumerate(container)
    if isinstance(container, dict):
        items = container.items()
    # A path in a file holds plain keys.
    return [([key], item) for key, item in items if isinstance(key, str | int)]


def attributes_of(value: Any) -> list[tuple[Step, Any]] | None:
    """Return the names and values of an object's attributes; None if it has no place for any."""
    in_slots: list[tuple[Step, Any]] = []
    for name, slot in slots_of(value).items():
        # One that is not set.
        with suppress(AttributeError):
            in_slots.append((name, slot.__get__(value)))
    try:
        # Runs no property and no code of a proxy.
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return in_slots or None
    # The namespace of a class is no dictionary, and is not state.
    if not isinstance(attributes, dict):
        return None
    return [*in_slots, *attributes.items()]


def slots_of(value: Any) -> dict[str, Any]:
    """Return the descriptors of the attributes that `__slots__` declares, by their names."""
    slots: dict[str, Any] = {}
    for base in reversed(type(value).__mro__):
        if "__slots__" in vars(base):
            slots.update((name, slot) for name, slot in vars(base).items() if isinstance(slot, MemberDescriptorType))
    return slots
