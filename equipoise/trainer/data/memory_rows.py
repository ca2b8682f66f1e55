"""Batches of datasets that lie in memory, whose rows are taken together.

A DataLoader reads a TensorDataset sample by sample, and stacks the samples. For a small batch this takes as long as the
step that trains on it. One operation for each tensor returns the same batch, to the bit.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

__all__ = ["Rows", "rows_of"]

# Kinds of numbers that every dataset takes for the number of a sample. Not `bool`, which torch takes for a mask.
_INDEX_KINDS = ("int", "int32", "int64")
_INDEX_DTYPES = (torch.int32, torch.int64)
# Parts of a batch that come from several datasets are copied once more than single samples. So these must be small, and
# each dataset must have several in a batch.
_LARGEST_JOINED_SAMPLE = 1 << 12  # bytes
_FEWEST_SAMPLES_OF_PART = 16


# Returns the collated batch of the samples with some numbers.
Take = Callable[[Sequence[int]], Any]


class Rows(NamedTuple):
    """Rows of a dataset in memory. It can be pickled, for workers of loaders.

    Attributes:
        take: Returns the collated batch of the samples with some numbers: a tensor, or lists and dictionaries of
            tensors. It raises an error if the batch must be read sample by sample, which also reports what is wrong
            with the numbers.
        sample_size: Bytes of one sample.
    """

    take: Take
    sample_size: int


def rows_of(dataset: Any) -> Rows | None:
    """Return the rows of a dataset; None if they do not lie in memory, or if it has methods that are not torch's own.

    Args:
        dataset: A TensorDataset, or a Subset, ConcatDataset or StackDataset of such datasets; a StackDataset may also
            hold tensors.

    Example:
        >>> dataset = TensorDataset(torch.arange(3), torch.arange(6).view(3, 2))
        >>> rows_of(dataset).take([2, 0])
        [tensor([2, 0]), tensor([[4, 5],
                [0, 1]])]
    """
    if not _has_torchs_methods(dataset):
        return None
    kind = type(dataset)
    if kind is TensorDataset:
        return _rows_of_tensors(dataset)
    if kind is Subset:
        return _rows_of_subset(dataset)
    return _rows_of_members(dataset)


def _has_torchs_methods(dataset: Any) -> bool:
    """Return False for subclasses and objects with methods of their own, which may read samples in another way."""
    kind: Any = type(dataset)
    if kind not in _METHODS or "__getitems__" in vars(dataset):
        return False
    return _methods_of(kind) == _METHODS[kind]


def _rows_of_tensors(dataset: TensorDataset) -> Rows | None:
    tensors = dataset.tensors
    if not all(map(_lies_in_memory, tensors)):
        return None
    take = partial(_take_of_tensors, dataset, tensors)
    sample_size = sum(map(_size_of_row, tensors))
    return Rows(take, sample_size)


def _rows_of_subset(subset: Subset[Any]) -> Rows | None:
    rows = rows_of(subset.dataset)
    if rows is None:
        return None
    take = partial(_take_of_subset, subset, subset.dataset, rows.take)
    return Rows(take, rows.sample_size)


def _rows_of_members(dataset: StackDataset[Any] | ConcatDataset[Any]) -> Rows | None:
    # 1. The rows of each member.
    members = _members_of(dataset)
    takes = []
    sizes = []
    for member in members:
        rows = _rows_of_member(member)
        if rows is None:
            return None
        takes.append(rows.take)
        sizes.append(rows.sample_size)

    # 2. A sample of a stack has a part of each member.
    if isinstance(dataset, StackDataset):
        take_stacked = partial(_take_of_stack, dataset, members, takes)
        return Rows(take_stacked, sum(sizes))

    # 3. A sample of joined datasets is that of one member.
    sample_size = max(sizes)
    if sample_size > _LARGEST_JOINED_SAMPLE:
        return None
    take_joined = partial(_take_of_joined, dataset, members, takes)
    return Rows(take_joined, sample_size)


def _methods_of(kind: type) -> tuple[Any, Any]:
    """Return the methods by which a class reads samples."""
    return getattr(kind, "__getitem__", None), getattr(kind, "__getitems__", None)


# The classes whose rows can be taken, and torch's methods: a program may have replaced some.
_METHODS = {kind: _methods_of(kind) for kind in (TensorDataset, Subset, ConcatDataset, StackDataset)}


def _members_of(dataset: Any) -> tuple[Any, ...]:
    """Return the datasets in a ConcatDataset or StackDataset; those of the latter may have names."""
    members = dataset.datasets
    if isinstance(members, dict):
        return tuple(members.values())
    return tuple(members)


def _rows_of_member(member: Any) -> Rows | None:
    """Return the rows of a dataset, or of a tensor in its place."""
    if not isinstance(member, Tensor):
        return rows_of(member)
    if not _lies_in_memory(member):
        return None
    take = partial(_take_of_tensor, member)
    return Rows(take, _size_of_row(member))


def _lies_in_memory(tensor: Any) -> bool:
    """Return True if rows of a tensor can be taken together, with the same result as one by one."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    # Samples have gradients of their own, and the memory format of a batch follows from that of its samples.
    if tensor.requires_grad or tensor.dim() == 0 or not tensor.is_contiguous():
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def _size_of_row(tensor: Tensor) -> int:
    """Return the bytes of one row of a tensor."""
    return tensor.nbytes // max(1, len(tensor))


def _check_indices(indices: Sequence[Any]) -> None:
    """Check that indices are plain numbers of samples.

    Raises:
        TypeError: If one of them is no whole number.
        IndexError: If one of them is negative, which datasets understand in several ways.
    """
    for kind in set(map(type, indices)):
        if kind.__name__ not in _INDEX_KINDS:
            raise TypeError(f"A {kind.__name__} is no number of a sample.")
    if min(indices) < 0:
        raise IndexError("A number of a sample is negative.")


def _taken(tensors: Iterable[Tensor], indices: Sequence[int]) -> list[Tensor]:
    """Return rows of tensors."""
    _check_indices(indices)
    # A tensor over the memory of an array takes a fraction of the time of `torch.tensor`.
    numbers = array("q", indices)
    chosen = torch.frombuffer(numbers, dtype=torch.int64)
    return [tensor.index_select(0, chosen) for tensor in tensors]


def _take_of_tensors(dataset: TensorDataset, tensors: tuple[Tensor, ...], indices: Sequence[int]) -> list[Tensor]:
    """Return rows of a TensorDataset, whose tensors have been these."""
    if dataset.tensors is not tensors:
        raise LookupError("The dataset has other tensors now.")
    return _taken(tensors, indices)


def _take_of_tensor(tensor: Tensor, indices: Sequence[int]) -> Tensor:
    """Return rows of a tensor that is a member of a StackDataset."""
    (rows,) = _taken([tensor], indices)
    return rows


def _take_of_subset(subset: Subset[Any], selected: Any, take: Take, indices: Sequence[int]) -> Any:
    """Return rows of a Subset, which has selected from this dataset."""
    if subset.dataset is not selected:
        raise LookupError("The subset selects from another dataset now.")
    _check_indices(indices)
    selection: Any = subset.indices
    if not isinstance(selection, Tensor):
        selected_indices = [selection[index] for index in indices]
        return take(selected_indices)
    if selection.dtype not in _INDEX_DTYPES:
        raise TypeError(f"A {selection.dtype} is no number of a sample.")
    chosen = selection[list(indices)]
    return take(chosen.tolist())


def _take_of_joined(
    dataset: ConcatDataset[Any], members: tuple[Any, ...], takes: Sequence[Take], indices: Sequence[int]
) -> Any:
    """Return rows of a ConcatDataset, whose parts have been these."""
    if _members_of(dataset) != members:
        raise LookupError("The dataset consists of other parts now.")
    _check_indices(indices)
    # 1. Find the samples of each part, and their positions in the batch.
    ends = dataset.cumulative_sizes
    samples: dict[int, list[int]] = {}
    positions: dict[int, list[int]] = {}
    for position, index in enumerate(indices):
        part = bisect_right(ends, index)
        begin = ends[part - 1] if part else 0
        samples.setdefault(part, []).append(index - begin)
        positions.setdefault(part, []).append(position)
    # 2. Put the rows of all parts together.
    if len(samples) > 1 and len(indices) < _FEWEST_SAMPLES_OF_PART * len(samples):
        raise LookupError("The parts have too few samples in the batch.")
    pieces = []
    for part, samples_of_part in samples.items():
        take = takes[part]
        pieces.append(take(samples_of_part))
    if len(pieces) == 1:
        return pieces[0]
    places = [torch.tensor(positions[part], device="cpu") for part in samples]
    return _merged(pieces, places, len(indices))


def _take_of_stack(
    dataset: StackDataset[Any], members: tuple[Any, ...], takes: Sequence[Take], indices: Sequence[int]
) -> Any:
    """Return rows of a StackDataset, whose members have been these."""
    # Two tensors that are not the same object cannot be compared, which is an error as well.
    if _members_of(dataset) != members:
        raise LookupError("The dataset has other members now.")
    batches = [take(indices) for take in takes]
    if isinstance(dataset.datasets, dict):
        return dict(zip(dataset.datasets, batches, strict=True))
    return batches


def _merged(pieces: Sequence[Any], places: Sequence[Tensor], size: int) -> Any:
    """Return one batch for pieces of it.

    Args:
        pieces: Rows of the batch: tensors, or lists and dictionaries of tensors.
        places: The places of each piece's rows in the batch.
        size: Number of rows of the batch.

    Raises:
        Exception: If the pieces have other structures, shapes or dtypes.
    """
    first = pieces[0]
    if len({type(piece) for piece in pieces}) > 1:
        raise TypeError("The parts have samples of several types.")
    if isinstance(first, dict):
        if any(piece.keys() != first.keys() for piece in pieces):
            raise TypeError("The parts have samples with other names.")
        values = {}
        for name in first:
            members = [piece[name] for piece in pieces]
            values[name] = _merged(members, places, size)
        return values
    if isinstance(first, list):
        return [_merged(members, places, size) for members in zip(*pieces, strict=True)]
    merged = first.new_empty((size, *first.shape[1:]))
    for piece, rows in zip(pieces, places, strict=True):
        merged.index_copy_(0, rows, piece)
    return merged
