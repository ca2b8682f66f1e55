"""The output of a network: its tensors, and the structure around them, of any classes."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equipoise import tree

__all__ = ["OutputStructure", "items_of_output", "structure_of"]

# Objects of these classes are no containers, although they have attributes.
_LEAVES = (Tensor, nn.Module, type, torch.Generator)
# Types of values that are described by their text. Of other objects only the type is described.
_DESCRIBED = (int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)


def items_of_output(value: Any) -> Iterable[Any] | None:
    """Return the items of a container in an output; None for any other value."""
    if isinstance(value, torch.Size):
        return None
    return tree.items_of(value)


def structure_of(value: Any) -> Any:
    """Return a description of a nested value: types, lengths, keys, dtypes, and what is no tensor."""
    if isinstance(value, Tensor):
        return ("tensor", str(value.dtype))
    kind = type(value).__name__
    items = items_of_output(value)
    if items is None:
        text = repr(value) if isinstance(value, _DESCRIBED) else ""
        return (kind, text)
    keys: tuple[str, ...] = ()
    if isinstance(value, Mapping):
        keys = tuple(map(repr, value))
    # Tuples alone: a graph turns lists into lists of its own.
    structures = tuple(structure_of(item) for item in items)
    return (kind, keys, structures)


class OutputStructure:
    """The structure of an output, and its tensors.

    Beside tuples, lists, mappings and dataclasses, an output may contain objects with tensors in their attributes, such
    as the caches of transformers' models. These are copied, with other tensors.

    Args:
        structure: The output with places where tensors are.
        tensors: The tensors, in order.

    Example:
        >>> structure = OutputStructure.of({"loss": torch.ones(()), "name": "x"})
        >>> structure.fill([3])
        {'loss': 3, 'name': 'x'}
    """

    def __init__(self, structure: Any, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self._structure = structure

    @classmethod
    def of(cls, value: Any) -> "OutputStructure":
        """Return the structure of an output, and its tensors."""
        tensors: list[Tensor] = []
        extract = partial(_extract, tensors)
        structure = tree.map_leaves(extract, value, items_of_output)
        return cls(structure, tensors)

    def without_tensors(self) -> "OutputStructure":
        """Return the structure alone, which keeps no tensor alive."""
        return OutputStructure(self._structure, [])

    def fill(self, tensors: Sequence[Any]) -> Any:
        """Return the output with other tensors.

        Args:
            tensors: As many tensors as the output has, in its order.
        """

        def insert(leaf: Any) -> Any:
            if isinstance(leaf, _Place):
                return tensors[leaf.index]
            if isinstance(leaf, _Copy):
                return leaf.filled(tensors)
            return leaf

        return tree.map_leaves(insert, self._structure, items_of_output)


class _Place:
    """Place of a tensor."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Copy:
    """An object with tensors in its attributes.

    Args:
        template: The object, with places where tensors were.
        places: These places.
    """

    def __init__(self, template: Any, places: list[_Place]) -> None:
        self._template = template
        self._places = places

    def filled(self, tensors: Sequence[Any]) -> Any:
        """Return a copy of the object with other tensors."""
        # A deep copy has the tensor of the memo in place of each place.
        memo = {id(place): tensors[place.index] for place in self._places}
        return copy.deepcopy(self._template, memo)


def _extract(tensors: list[Tensor], leaf: Any) -> Any:
    """Return what stands for a leaf of an output in its structure, and add its tensors to a list."""
    # 1. Tensors, and objects without tensors.
    if isinstance(leaf, Tensor):
        return _place_of(leaf, tensors)
    tensors_of_leaf = _tensors_in_attributes(leaf)
    if not tensors_of_leaf:
        return leaf

    # 2. Objects with tensors. A deep copy takes what its memo has for an object.
    memo: dict[int, Any] = {}
    places = []
    for tensor in tensors_of_leaf:
        place = _place_of(tensor, tensors)
        memo[id(tensor)] = place
        places.append(place)
    template = copy.deepcopy(leaf, memo)
    return _Copy(template, places)


def _place_of(tensor: Tensor, tensors: list[Tensor]) -> _Place:
    """Add a tensor to a list, and return its place there."""
    tensors.append(tensor)
    index = len(tensors) - 1
    return _Place(index)


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

        # 2. Go on with its items or attributes.
        contents = items_of_output(item)
        if contents is None and not isinstance(item, _LEAVES):
            contents = getattr(item, "__dict__", {}).values()
        if contents is not None:
            waiting.extend(contents)
    return tensors
