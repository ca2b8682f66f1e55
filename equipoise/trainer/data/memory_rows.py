"""Batches of datasets that lie in memory, whose rows are taken together.

A DataLoader reads a TensorDataset sample by sample, and stacks the samples. For a small batch this takes as long as the
step that trains on it. One operation for each tensor returns the same batch, to the bit.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

__all__ = ["sample_size", "take"]

# Kinds of numbers that every dataset takes for the number of a sample. Not `bool`, which torch takes for a mask.
_INDEX_KINDS = ("int", "int32", "int64")
_INDEX_DTYPES = (torch.int32, torch.int64)
# Parts of a batch that come from several datasets are copied once more than single samples. So these must be small, and
# each dataset must have several in a batch.
_LARGEST_JOINED_SAMPLE = 1 << 12  # bytes
_FEWEST_SAMPLES_OF_PART = 16


def _methods_of(kind: type) -> tuple[Any, Any]:
    """Return the methods by which a class reads samples."""
    return getattr(kind, "__getitem__", None), getattr(kind, "__getitems__", None)


# The classes whose rows can be taken, each with a function that returns its parts, and the methods that torch has
# defined: a program may have replaced these.
_PARTS: dict[type, Callable[[Any], Any]] = {
    TensorDataset: attrgetter("tensors"),
    Subset: lambda subset: [subset.dataset],
    ConcatDataset: attrgetter("datasets"),
    StackDataset: attrgetter("datasets"),
}
_METHODS = {kind: _methods_of(kind) for kind in _PARTS}


def sample_size(dataset: Any) -> int | None:
    """Return the bytes of a sample; None if samples do not lie in memory, or are not read by torch's own methods.

    Args:
        dataset: A TensorDataset, or a Subset, ConcatDataset or StackDataset of such datasets or of tensors.

    Example:
        >>> sample_size(TensorDataset(torch.arange(3), torch.zeros(3, 2)))
        16
    """
    if isinstance(dataset, Tensor):
        if not _lies_in_memory(dataset):
            return None
        return dataset.nbytes // max(1, len(dataset))
    # Subclasses and objects with methods of their own may read samples in another way.
    kind: Any = type(dataset)
    if kind not in _PARTS:
        return None
    has_own_method = "__getitems__" in vars(dataset)
    if has_own_method or _methods_of(kind) != _METHODS[kind]:
        return None
    sizes = []
    for part in _parts_of(dataset):
        size = sample_size(part)
        if size is None:
            return None
        sizes.append(size)
    if kind is not ConcatDataset:
        return sum(sizes)
    # A sample of joined datasets is that of one of them.
    largest = max(sizes)
    if largest > _LARGEST_JOINED_SAMPLE:
        return None
    return largest


def _parts_of(dataset: Any) -> Any:
    parts = _PARTS[type(dataset)](dataset)
    if isinstance(parts, dict):
        return tuple(parts.values())
    return parts


def _lies_in_memory(tensor: Tensor) -> bool:
    """Return True if rows of a tensor can be taken together, with the same result as one by one."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    # Samples have gradients of their own, and the memory format of a batch follows from that of its samples.
    if tensor.requires_grad or tensor.dim() == 0 or not tensor.is_contiguous():
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def take(dataset: Any, indices: Sequence[Any]) -> Any:
    """Return the collated batch of some samples: a tensor, or lists and dictionaries of tensors.

    Args:
        dataset: A dataset that has a `sample_size`.
        indices: The numbers of the samples.

    Raises:
        Exception: If the batch must be read sample by sample, which also reports what is wrong with the numbers.

    Example:
        >>> take(TensorDataset(torch.arange(3), torch.arange(6).view(3, 2)), [2, 0])
        [tensor([2, 0]), tensor([[4, 5],
                [0, 1]])]
    """
    _check_indices(indices)
    kind = type(dataset)
    if kind is TensorDataset:
        chosen = _as_tensor(indices)
        return [tensor.index_select(0, chosen) for tensor in dataset.tensors]
    if kind is Tensor:
        return dataset.index_select(0, _as_tensor(indices))
    if kind is Subset:
        return take(dataset.dataset, _selected(dataset.indices, indices))
    if kind is ConcatDataset:
        return _take_joined(dataset, indices)
    # The dataset may have changed since the loader was opened: one of another class has no parts.
    batches = [take(part, indices) for part in _parts_of(dataset)]
    if isinstance(dataset.datasets, dict):
        return dict(zip(dataset.datasets, batches, strict=True))
    return batches


def _check_indices(indices: Sequence[Any]) -> None:
    """Check that indices are plain numbers; negative ones are understood by datasets in several ways."""
    for kind in set(map(type, indices)):
        if kind.__name__ not in _INDEX_KINDS:
            raise TypeError(f"A {kind.__name__} is no number of a sample.")
    if min(indices) < 0:
        raise IndexError("A number of a sample is negative.")


def _as_tensor(indices: Sequence[int]) -> Tensor:
    # A tensor over the memory of an array takes a fraction of the time of `torch.tensor`.
    return torch.frombuffer(array("q", indices), dtype=torch.int64)


def _selected(selection: Any, indices: Sequence[int]) -> list[Any]:
    """Return the numbers that a Subset has selected in its dataset."""
    if not isinstance(selection, Tensor):
        return [selection[index] for index in indices]
    if selection.dtype not in _INDEX_DTYPES:
        raise TypeError(f"A {selection.dtype} is no number of a sample.")
    selected: list[int] = selection[list(indices)].tolist()
    return selected


def _take_joined(dataset: ConcatDataset[Any], indices: Sequence[int]) -> Any:
    """Return the batch of samples of several datasets."""
    # 1. Find the samples of each part, and their positions in the batch.
    ends = dataset.cumulative_sizes
    samples: dict[int, list[int]] = {}
    positions: dict[int, list[int]] = {}
    for position, index in enumerate(indices):
        part = bisect_right(ends, index)
        begin = 0
        if part:
            begin = ends[part - 1]
        samples.setdefault(part, []).append(index - begin)
        positions.setdefault(part, []).append(position)
    if len(samples) > 1 and len(indices) < _FEWEST_SAMPLES_OF_PART * len(samples):
        raise LookupError("The parts have too few samples in the batch.")
    # 2. Put the rows of all parts together.
    pieces = [take(dataset.datasets[part], samples_of_part) for part, samples_of_part in samples.items()]
    if len(pieces) == 1:
        return pieces[0]
    places = [torch.tensor(positions[part], device="cpu") for part in samples]
    return _merged(pieces, places, len(indices))


def _merged(pieces: Sequence[Any], places: Sequence[Tensor], size: int) -> Any:
    """Merge pieces of a batch, whose rows have these places in it; raise an error if their structures differ."""
    first = pieces[0]
    if len({type(piece) for piece in pieces}) > 1:
        raise TypeError("The parts have samples of several types.")
    if isinstance(first, dict):
        if any(piece.keys() != first.keys() for piece in pieces):
            raise TypeError("The parts have samples with other names.")
        return {name: _merged([piece[name] for piece in pieces], places, size) for name in first}
    if isinstance(first, list):
        return [_merged(members, places, size) for members in zip(*pieces, strict=True)]
    merged = first.new_empty((size, *first.shape[1:]))
    for piece, rows in zip(pieces, places, strict=True):
        merged.index_copy_(0, rows, piece)
    return merged
