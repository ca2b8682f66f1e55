"""The output of a network: its tensors, and the structure around them, of any classes."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise import tree

__all__ = ["OutputStructure", "structure_of"]

# Objects of these classes are no containers, although they have attributes.
_LEAVES = (Tensor, nn.Module, type, torch.Generator)
# Types of values that are described by their text. Of other objects only the type is described.
_DESCRIBED = (int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)


def structure_of(value: Any) -> Any:
    """Return a description of a nested value: types, lengths, keys, dtypes, and what is no tensor."""
    if isinstance(value, Tensor):
        return ("tensor", str(value.dtype))
    kind = type(value).__name__
    items = tree.items_of(value)
    if items is None:
        return (kind, repr(value) if isinstance(value, _DESCRIBED) else "")
    keys: tuple[str, ...] = ()
    if isinstance(value, Mapping):
        keys = tuple(map(repr, value))
    # Tuples alone: a graph turns lists into lists of its own.
    return (kind, keys, tuple(structure_of(item) for item in items))


@dataclass(frozen=True, eq=False)
class OutputStructure:
    """The structure of an output, from which it is made again with other tensors. It keeps no tensor alive.

    Beside tuples, lists, mappings and dataclasses, an output may contain objects with tensors in their attributes, such
    as the caches of transformers' models. All of these are copied; objects without tensors stay the same.

    Attributes:
        template: The output with places where tensors are.
        places: The places, in the order of the tensors.
        others: The objects without tensors in the output.

    Example:
        >>> structure, tensors = OutputStructure.of({"loss": torch.ones(()), "name": "x"})
        >>> structure.fill([3])
        {'loss': 3, 'name': 'x'}
    """

    template: Any
    places: Sequence["_Place"]
    others: Sequence[Any]

    @classmethod
    def of(cls, value: Any) -> "tuple[OutputStructure, list[Tensor]]":
        """Return the structure of an output, and its tensors, each once."""
        # 1. Find the tensors, each once, and everything else that is no container of them.
        tensors_by_id: dict[int, Tensor] = {}
        others = []
        for leaf in tree.leaves_of(value):
            tensors_of_leaf = _tensors_in_attributes(leaf)
            if not tensors_of_leaf:
                others.append(leaf)
            for tensor in tensors_of_leaf:
                tensors_by_id[id(tensor)] = tensor

        # 2. A deep copy takes what its memo has for the identity of an object.
        tensors = list(tensors_by_id.values())
        places = [_Place() for _ in tensors]
        memo = _by_identity(tensors, places)
        memo |= _by_identity(others, others)
        return cls(_copied(value, memo), places, others), tensors

    def fill(self, tensors: Sequence[Any]) -> Any:
        """Return the output with other tensors.

        Args:
            tensors: As many tensors as the output has, in its order.
        """
        memo = _by_identity(self.places, tensors)
        memo |= _by_identity(self.others, self.others)
        return _copied(self.template, memo)


class _Place:
    """Place of a tensor."""


def _by_identity(objects: Iterable[Any], values: Iterable[Any]) -> dict[int, Any]:
    return dict(zip(map(id, objects), values, strict=True))


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy, with named tuples made without their constructors, which may refuse what is no tensor."""
    contents = tree.items_of(value)
    if contents is None:
        return copy.deepcopy(value, memo)
    items = [_copied(item, memo) for item in contents]
    if hasattr(value, "_make"):
        # A deep copy takes it from here.
        memo.setdefault(id(value), tree.rebuild(value, items))
    return copy.deepcopy(value, memo)


def _tensors_in_attributes(value: Any) -> list[Tensor]:
    """Return the tensors in the attributes of an object, and of the objects in these; empty for other values."""
    tensors: list[Tensor] = []
    visited: set[int] = set()
    waiting = [value]
    while waiting:
        # 1. Take the last object. Attributes may refer to each other in circles.
        item = waiting.pop()
        item_id = id(item)
        if item_id in visited:
            continue
        visited.add(item_id)
        if isinstance(item, Tensor):
            tensors.append(item)
            continue

        # 2. Continue with its items or attributes.
        contents = tree.items_of(item)
        if contents is None and not isinstance(item, _LEAVES):
            contents = getattr(item, "__dict__", {}).values()
        if contents is not None:
            waiting.extend(contents)
    return tensors
