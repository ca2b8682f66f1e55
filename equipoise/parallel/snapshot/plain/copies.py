"""Copies of plain values, of types that a file may hold."""

from collections import Counter, OrderedDict, defaultdict, deque
from functools import partial
from typing import Any

import torch
from torch import Tensor

__all__ = ["Copies", "copied"]

# Values and what stands for them, by the identity of the value, which lives as long as its entry.
Copies = dict[int, tuple[Any, Any]]

_CPU = torch.device("cpu")
# Factories of dictionaries that a file may name; those of the user's own program are code.
_FACTORIES = (None, bool, dict, float, int, list, set, str, tuple)


def copied(value: Any, device: torch.device = _CPU, copies: Copies | None = None) -> Any:
    """Return a copy of a plain value, of types that a file may hold.

    Args:
        value: The value.
        device: The device of its tensors. Default: the CPU.
        copies: Values that have been copied already, so that one that is in several others remains one. Default: None.
    """
    copies = {} if copies is None else copies
    if id(value) in copies:
        return copies[id(value)][1]
    copy = _copy(value, device, copies)
    if copy is not value:
        copies[id(value)] = value, copy
    return copy


def _copy(value: Any, device: torch.device, copies: Copies) -> Any:
    kind = type(value)
    copied_item = partial(copied, device=device, copies=copies)
    if isinstance(value, Tensor):
        copy = value.detach().to(device, copy=True)
        return copy.requires_grad_(value.requires_grad and value.is_leaf)
    # Named tuples are no plain values.
    if kind in (list, tuple):
        return kind(map(copied_item, value))
    if kind is deque:
        return deque(map(copied_item, value), value.maxlen)
    if isinstance(value, dict):
        return _dictionary_like(value, {key: copied_item(item) for key, item in value.items()})
    # Numbers of numpy have a method `copy`, too.
    if isinstance(value, set | bytearray) or kind.__module__ == "numpy":
        return value.copy()
    # What remains cannot be changed in place.
    return value


def _dictionary_like(value: Any, items: dict[Any, Any]) -> Any:
    """Return items in the kind of dictionary of a value, or in a plain one if a file may not hold that kind."""
    kind = type(value)
    if kind is defaultdict and value.default_factory in _FACTORIES:
        return defaultdict(value.default_factory, items)
    if kind in (OrderedDict, Counter):
        return kind(items)
    return items
