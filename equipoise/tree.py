"""Nested structures: their items, their tensors, and structures like them with other values.

Every function goes through a structure by a rule, which returns the items of a container, and None for any other value.
`items_of` is the rule for batches and outputs; others are given as an argument.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Size, Tensor

__all__ = [
    "ItemsOf",
    "entries_of",
    "extract_tensors",
    "insert_tensors",
    "is_slot",
    "items_of",
    "leaves_of",
    "map_leaves",
    "rebuild",
    "tensors_in",
]

# Returns the items of a container, in order; None: the value is no container.
ItemsOf = Callable[[Any], Iterable[Any] | None]


def items_of(value: Any) -> Iterable[Any] | None:
    """Return the items of a mapping, tuple, list or dataclass, in order; None for any other value.

    Named tuples, `UserDict` and the outputs of transformers' models are among them, a `torch.Size` is not.

    Example:
        >>> list(items_of({"x": 1, "y": [2]}))
        [1, [2]]
    """
    if isinstance(value, (tuple, list)) and not isinstance(value, Size):
        return value
    if isinstance(value, Mapping):
        return value.values()
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return None


def entries_of(batch: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a nested batch in order, with its path, such as `[0]['mask']`."""
    if isinstance(batch, Tensor):
        yield path, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from entries_of(value, f"{path}[{key!r}]")
    elif isinstance(batch, (tuple, list)):
        for index, value in enumerate(batch):
            yield from entries_of(value, f"{path}[{index}]")
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            value = getattr(batch, field.name)
            yield from entries_of(value, f"{path}.{field.name}")


def tensors_in(value: Any, items_of: ItemsOf = items_of) -> Iterator[Tensor]:
    """Yield every tensor of a nested value, in order.

    Args:
        value: A nested value.
        items_of: The rule. Default: that of batches.
    """
    if isinstance(value, Tensor):
        yield value
        return
    items = items_of(value)
    if items is not None:
        for item in items:
            yield from tensors_in(item, items_of)


def leaves_of(value: Any, items_of: ItemsOf = items_of) -> Iterator[Any]:
    """Yield everything in a nested value that is no container, in order.

    Args:
        value: A nested value.
        items_of: The rule. Default: that of batches.
    """
    items = items_of(value)
    if items is None:
        yield value
        return
    for item in items:
        yield from leaves_of(item, items_of)


def map_leaves(function: Callable[[Any], Any], value: Any, items_of: ItemsOf = items_of) -> Any:
    """Apply a function to everything in a nested value that is no container.

    Args:
        function: Returns the new value of a leaf.
        value: A nested value. It is not changed.
        items_of: The rule. Default: that of batches.

    Returns:
        The same structure with the new values.

    Example:
        >>> map_leaves(abs, {"x": -1, "y": [-2, 3]})
        {'x': 1, 'y': [2, 3]}
    """
    items = items_of(value)
    if items is None:
        return function(value)
    return rebuild(value, [map_leaves(function, item, items_of) for item in items])


def rebuild(like: Any, values: Sequence[Any]) -> Any:
    """Return a container like another, with other values.

    Args:
        like: A mapping, tuple, named tuple, list or dataclass.
        values: The new values, in the order of its items.
    """
    if isinstance(like, Mapping):
        return _rebuild_mapping(like, values)
    if isinstance(like, (tuple, list)):
        # The constructor of a named tuple, such as a `PackedSequence`, may refuse what stands for tensors.
        make = getattr(like, "_make", type(like))
        made = make(values)
        if hasattr(made, "__dict__"):
            vars(made).update(vars(like))
        return made
    result = copy.copy(like)
    pairs = zip(fields(like), values, strict=True)
    for field, value in pairs:
        # The dataclass may be frozen.
        object.__setattr__(result, field.name, value)
    return result


def _rebuild_mapping(like: Mapping[Any, Any], values: Sequence[Any]) -> Any:
    items = dict(zip(like, values, strict=True))
    try:
        result: Any = copy.copy(like)
        # Not `update`, which outputs of transformers' models refuse.
        for key, value in items.items():
            result[key] = value
    except (AttributeError, TypeError):
        # The mapping is read-only.
        return items
    return result


class _Slot:
    """Place of a tensor that was extracted."""

    def __init__(self, index: int) -> None:
        self.index = index

    # The texts of two trees are equal if they differ in their tensors only.
    def __repr__(self) -> str:
        return f"<{self.index}>"


def is_slot(tree: Any) -> bool:
    """Return True for the structure of a tensor in no container, which `extract_tensors` split."""
    return type(tree) is _Slot


def extract_tensors(value: Any, items_of: ItemsOf = items_of) -> tuple[Any, list[Tensor]]:
    """Split a nested value into its structure and its tensors.

    Args:
        value: A nested value. It is not changed.
        items_of: The rule. Default: that of batches.

    Returns:
        The same structure with slots in place of tensors, for `insert_tensors`; and the tensors, in order.

    Example:
        >>> import torch
        >>> extract_tensors([torch.ones(1), {"x": 2}])
        ([<0>, {'x': 2}], [tensor([1.])])
    """
    tensors: list[Tensor] = []

    def extract(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf)
        return _Slot(len(tensors) - 1)

    return map_leaves(extract, value, items_of), tensors


def insert_tensors(tree: Any, tensors: Any, items_of: ItemsOf = items_of) -> Any:
    """Return a nested value that `extract_tensors` split, with other tensors.

    Args:
        tree: The structure.
        tensors: As many tensors as were extracted, or values that stand for them, by index.
        items_of: The rule by which they were extracted. Default: that of batches.
    """

    def insert(leaf: Any) -> Any:
        if isinstance(leaf, _Slot):
            return tensors[leaf.index]
        return leaf

    return map_leaves(insert, tree, items_of)
