"""A batch like another, with another number of samples and no memory."""

from typing import Any

import torch
from torch import Tensor

from equipoise.errors import ConfigurationError
from equipoise.interop.torch.fake_tensors import is_fake
from equipoise.parallel.batches.splitting import holds_samples, infer_batch_size, why_not
from equipoise.tree import items_of, map_leaves, rebuild

__all__ = ["batch_of_size", "size_of_batch"]


def size_of_batch(batch: Any) -> int:
    """Return the number of samples of a batch.

    Args:
        batch: A nested batch. A list of images counts them.

    Raises:
        ConfigurationError: If the size cannot be found.
    """
    samples = _listed_samples(batch)
    if samples is not None:
        return samples
    size = infer_batch_size(batch)
    if size is None or size < 1:
        reason = why_not(batch, 0, "The batch of a plan")
        raise ConfigurationError(f"{reason} Give a batch whose tensors all begin with the dimension of the samples.")
    return size


def batch_of_size(batch: Any, size: int) -> Any:
    """Return a batch of the same kind with another number of samples, which are those of the batch in turn.

    Args:
        batch: A nested batch.
        size: The number of samples.

    Raises:
        ConfigurationError: If the number of samples of `batch` cannot be found.
    """
    present = size_of_batch(batch)
    if _listed_samples(batch) is not None:
        return _with_listed_samples(batch, present, size)

    def resized(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.ndim:
            return _repeated(value, size)
        return _copied(value)

    return map_leaves(resized, batch)


def _repeated(tensor: Tensor, size: int) -> Tensor:
    """Return a tensor of the first samples of another, repeated as often as needed."""
    result = torch.empty((size, *tensor.shape[1:]), dtype=tensor.dtype)
    if is_fake(result):
        return result
    present = tensor.size(0)
    for start in range(0, size, present):
        count = min(present, size - start)
        result[start : start + count].copy_(tensor[:count])
    return result


def _copied(tensor: Tensor) -> Tensor:
    """Return a tensor of equal values."""
    result = torch.empty(tensor.shape, dtype=tensor.dtype)
    if not is_fake(result):
        result.copy_(tensor)
    return result


def _listed_samples(batch: Any) -> int | None:
    """Return the length of the lists of samples in a batch, such as images of different sizes; None without any."""
    if not holds_samples(batch):
        return None
    if isinstance(batch, list) and all(isinstance(item, Tensor) for item in batch):
        return len(batch)
    # Images with their labels: the list and the tensor beside it are of one length.
    lengths = set()
    for item in items_of(batch) or ():
        if isinstance(item, (list, tuple)):
            lengths.add(len(item))
        elif isinstance(item, Tensor) and item.ndim:
            lengths.add(item.size(0))
    if len(lengths) != 1:
        return None
    return lengths.pop()


def _with_listed_samples(batch: Any, present: int, size: int) -> Any:
    """Return a batch whose lists of samples have another length; the samples repeat."""
    if isinstance(batch, Tensor) and batch.ndim and batch.size(0) == present:
        return _repeated(batch, size)
    if isinstance(batch, (list, tuple)) and len(batch) == present and holds_samples(list(batch)):
        samples = [_copied(batch[index % present]) for index in range(size)]
        return type(batch)(samples)
    items = items_of(batch)
    if items is None:
        return batch
    return rebuild(batch, [_with_listed_samples(item, present, size) for item in items])
