"""A batch like another, with another number of samples and no memory."""

from typing import Any

import torch
from torch import Tensor

from equipoise.errors import ConfigurationError
from equipoise.extensions.common.interop import is_fake
from equipoise.parallel.batches.splitting import holds_samples, infer_batch_size, why_not
from equipoise.tree import items_of, map_leaves, rebuild, tensors_in

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
    if _is_list_of_images(batch):
        return len(batch)
    # Images with their labels: the list and the tensor beside it are of one length.
    lengths = set()
    for item in items_of(batch) or ():
        if _may_list_samples(item):
            lengths.add(len(item))
        elif isinstance(item, Tensor) and item.ndim:
            lengths.add(item.size(0))
    if len(lengths) != 1:
        return None
    return lengths.pop()


def _is_list_of_images(batch: Any) -> bool:
    return isinstance(batch, list) and all(isinstance(item, Tensor) for item in batch)


def _may_list_samples(value: Any) -> bool:
    """Return whether a value is a list of tensors, or of structures with tensors."""
    if type(value) not in (list, tuple):
        return False
    return next(iter(tensors_in(value)), None) is not None


def _with_listed_samples(batch: Any, present: int, size: int) -> Any:
    """Return a batch whose lists of samples have another length; the samples repeat."""
    if _is_list_of_images(batch):
        return _listed(batch, size)
    # The batch may have as many parts as samples, so only its parts are lists of samples.
    return rebuild(batch, [_resized_part(part, present, size) for part in items_of(batch) or ()])


def _resized_part(value: Any, present: int, size: int) -> Any:
    """Return a part of a batch with other samples; what does not hold one for each sample stays as it is."""
    if isinstance(value, Tensor) and value.ndim and value.size(0) == present:
        return _repeated(value, size)
    if _may_list_samples(value) and len(value) == present:
        return _listed(value, size)
    items = items_of(value)
    if items is None:
        return value
    return rebuild(value, [_resized_part(item, present, size) for item in items])


def _listed(samples: Any, size: int) -> Any:
    """Return a list of another length, whose samples repeat. Each may be a tensor or a structure with tensors."""

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _copied(value)
        return value

    return type(samples)([map_leaves(copied, samples[index % len(samples)]) for index in range(size)])
