"""Sizes of nested batches.

A batch may be a tensor, or tensors in tuples, named tuples, lists, mappings (`UserDict` among them) and dataclasses,
nested at will.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

__all__ = ["infer_batch_size", "tensors_of"]


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yields every tensor of a nested batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from tensors_of(value)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from tensors_of(getattr(batch, field.name))


def infer_batch_size(batch: Any) -> int | None:
    """Returns the first dimension that all tensors of a batch share; None if they share none, or there is no tensor.

    Tensors without dimensions are passed over: they belong to the whole batch.
    """
    if type(batch) in (tuple, list) and len(batch) == 2:  # (input, target): nine batches of ten, and half the time
        first, second = batch
        if type(first) is Tensor and type(second) is Tensor and first.ndim and second.ndim:
            size = first.size(0)
            return size if second.size(0) == size else None
    # Not shape[0], which a tensor of nested layout does not have.
    sizes = {tensor.size(0) for tensor in tensors_of(batch) if tensor.ndim}
    return sizes.pop() if len(sizes) == 1 else None
