"""Paths: the attributes and items that lead from a named object to what it holds."""

import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
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
# The parts of a partial, in the order of its state.
_PARTS = ("func", "args", "keywords")
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
    if isinstance(value, nn.Module | Dataset | Sampler | SimpleNamespace | Namespace | MethodType | partial):
        return attributes_of(value)
    # A function is of the module that defines it.
    owner = value if isinstance(value, FunctionType) else type(value)
    package = str(owner.__module__).split(".")[0]
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


class _FreeVariable:
    """A variable of the code around a function, read and set like an attribute in a slot is."""

    def __init__(self, cell: CellType) -> None:
        self._cell = cell

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        try:
            return self._cell.cell_contents
        # It has no value yet.
        except ValueError as error:
            raise AttributeError from error

    def __set__(self, owner: Any, value: Any) -> None:
        self._cell.cell_contents = value

    def __delete__(self, owner: Any) -> None:
        del self._cell.cell_contents


class _Argument:
    """A part of a partial, read and set like an attribute in a slot is."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return getattr(owner, self._name)

    def __set__(self, owner: Any, value: Any) -> None:
        parts = {name: getattr(owner, name) for name in _PARTS} | {self._name: value}
        owner.__setstate__((*parts.values(), vars(owner)))


def slots_of(value: Any) -> dict[str, Any]:
    """Return the descriptors of attributes in slots by name, and of what functions, methods and partials hold."""
    if isinstance(value, FunctionType):
        variables = map(_FreeVariable, value.__closure__ or ())
        return dict(zip(value.__code__.co_freevars, variables, strict=True))
    if isinstance(value, MethodType):
        return {"__self__": vars(MethodType)["__self__"]}
    slots: dict[str, Any] = {}
    if isinstance(value, partial):
        slots = {name: _Argument(name) for name in _PARTS}
    for base in reversed(type(value).__mro__):
        if "__slots__" in vars(base):
            slots.update((name, slot) for name, slot in vars(base).items() if isinstance(slot, MemberDescriptorType))
    return slots
