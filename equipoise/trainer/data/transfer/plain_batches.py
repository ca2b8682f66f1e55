"""Batches that consist of plain containers, and their tensors that can be copied beside the work of a device."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.to_device import to_device

__all__ = ["foreign_type", "host_tensors", "with_copies"]


def host_tensors(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch that a side stream may copy, in order.

    Args:
        batch: A batch. Tensors in containers that `foreign_type` names are not among them.
    """
    tensors: list[Tensor] = []
    _collect(batch, tensors)
    return tensors


def _collect(value: Any, tensors: list[Tensor]) -> None:
    # A tensor that occurs twice is collected twice, since it has two copies without prefetch as well.
    if _may_be_copied(value):
        tensors.append(value)
        return
    items = _items_of(value)
    if items is not None:
        for item in items:
            _collect(item, tensors)


def with_copies(batch: Any, copies: Iterator[Tensor], device: torch.device) -> Any:
    """Return a batch with copies in place of the tensors that `host_tensors` has returned.

    Args:
        batch: The batch, of which `foreign_type` names nothing.
        copies: The copies, in the order of the tensors.
        device: The device to which all other tensors go.
    """
    if _may_be_copied(batch):
        return next(copies)
    if isinstance(batch, Tensor):
        return to_device(batch, device)
    items = _items_of(batch)
    if items is None:
        return batch
    # Containers are new ones, as they are without prefetch.
    values = [with_copies(item, copies, device) for item in items]
    kind = type(batch)
    if kind is list:
        return values
    if kind is tuple:
        return tuple(values)
    if kind is dict:
        return dict(zip(batch, values, strict=True))
    # A named tuple takes its fields as arguments.
    return kind(*values)


def foreign_type(batch: Any) -> type | None:
    """Return the type of the first object in a batch whose copy is a matter of its own class; None if there is none."""
    # A text is a sequence of texts.
    if isinstance(batch, (Tensor, str, bytes)):
        return None
    items = _items_of(batch)
    if items is None:
        return type(batch) if _copies_itself(batch) else None
    for item in items:
        kind = foreign_type(item)
        if kind is not None:
            return kind
    return None


def _copies_itself(value: Any) -> bool:
    """Return True if a value has a method for its copy, or is a container that its own class must make."""
    if callable(getattr(type(value), "to", None)):
        return True
    # Lightning goes into these, too, and calls their classes.
    return isinstance(value, (Mapping, Sequence)) or (is_dataclass(value) and not isinstance(value, type))


def _items_of(value: Any) -> Any:
    """Return the items of a tuple, named tuple, list or dictionary; None for anything else."""
    # Subclasses may do anything when they are made.
    kind = type(value)
    if kind is dict:
        return value.values()
    if kind in (tuple, list) or _is_named_tuple(kind):
        return value
    return None


def _is_named_tuple(kind: type) -> bool:
    return kind.__bases__ == (tuple,) and hasattr(kind, "_fields")


def _may_be_copied(value: Any) -> bool:
    """Return True if a value is a plain tensor of the host, whose copy has no graph and no class of its own."""
    if type(value) is not Tensor or not value.is_cpu:
        return False
    # The backward of a copy would run on the stream of the copy.
    return value.layout is torch.strided and not value.requires_grad
