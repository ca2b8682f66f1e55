"""Batches of datasets that lie in memory, whose rows are taken together.

A DataLoader reads a TensorDataset sample by sample, and stacks the samples. For a small batch this takes as long as the
step that trains on it. One operation for each tensor returns the same batch, to the bit.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

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


class Rows(Protocol):
    """Rows of a dataset in memory. Classes can be pickled, for workers of loaders.

    Attributes:
        sample_size: Bytes of one sample.
    """

    sample_size: int

    def take(self, indices: Sequence[int]) -> Any:
        """Return the collated batch of some samples: a tensor, or lists and dictionaries of tensors.

        Args:
            indices: Numbers of the samples.

        Raises:
            Exception: If the batch must be read sample by sample. That also reports what is wrong with the indices.
        """
        ...


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
    kind: Any = type(dataset)
    # Subclasses, and objects with methods of their own, may read their samples in another way.
    if kind not in _METHODS or "__getitems__" in vars(dataset) or _methods_of(kind) != _METHODS[kind]:
        return None
    if kind is TensorDataset:
        if not all(map(_lies_in_memory, dataset.tensors)):
            return None
        return _TensorRows(dataset)
    if kind is Subset:
        rows = rows_of(dataset.dataset)
        return None if rows is None else _SubsetRows(dataset, rows)
    members = _members_of(dataset)
    member_rows = []
    for member in members:
        rows = _rows_of_member(member)
        if rows is None:
            return None
        member_rows.append(rows)
    if kind is StackDataset:
        return _StackedRows(dataset, member_rows)
    joined = _JoinedRows(dataset, member_rows)
    return joined if joined.sample_size <= _LARGEST_JOINED_SAMPLE else None


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
    if isinstance(member, Tensor):
        return _RowsOfTensor(member) if _lies_in_memory(member) else None
    return rows_of(member)


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


class _TensorRows:
    """Rows of a TensorDataset."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset
        self._tensors = dataset.tensors
        self.sample_size = sum(map(_size_of_row, dataset.tensors))

    def take(self, indices: Sequence[int]) -> list[Tensor]:
        """Return a batch; see `Rows`."""
        if self._dataset.tensors is not self._tensors:
            raise LookupError("The dataset has other tensors now.")
        return _taken(self._tensors, indices)


class _RowsOfTensor:
    """Rows of a tensor that is a member of a StackDataset."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.sample_size = _size_of_row(tensor)

    def take(self, indices: Sequence[int]) -> Tensor:
        """Return a batch; see `Rows`."""
        (rows,) = _taken([self._tensor], indices)
        return rows


class _SubsetRows:
    """Rows of a Subset.

    Args:
        subset: The subset.
        rows: Rows of the dataset from which it selects.
    """

    def __init__(self, subset: Subset[Any], rows: Rows) -> None:
        self._subset = subset
        self._rows = rows
        self._selected = subset.dataset
        self.sample_size = rows.sample_size

    def take(self, indices: Sequence[int]) -> Any:
        """Return a batch; see `Rows`."""
        if self._subset.dataset is not self._selected:
            raise LookupError("The subset selects from another dataset now.")
        _check_indices(indices)
        selection: Any = self._subset.indices
        if not isinstance(selection, Tensor):
            return self._rows.take([selection[index] for index in indices])
        if selection.dtype not in _INDEX_DTYPES:
            raise TypeError(f"A {selection.dtype} is no number of a sample.")
        return self._rows.take(selection[list(indices)].tolist())


class _JoinedRows:
    """Rows of a ConcatDataset."""

    def __init__(self, dataset: ConcatDataset[Any], parts: Sequence[Rows]) -> None:
        self._dataset = dataset
        self._members = _members_of(dataset)
        self._parts = parts
        self.sample_size = max(part.sample_size for part in parts)

    def take(self, indices: Sequence[int]) -> Any:
        """Return a batch; see `Rows`."""
        if _members_of(self._dataset) != self._members:
            raise LookupError("The dataset consists of other parts now.")
        _check_indices(indices)
        # 1. Find the samples of each part, and their positions in the batch.
        ends = self._dataset.cumulative_sizes
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
        pieces = [self._parts[part].take(samples[part]) for part in samples]
        if len(pieces) == 1:
            return pieces[0]
        places = [torch.tensor(positions[part], device="cpu") for part in samples]
        return _merged(pieces, places, len(indices))


class _StackedRows:
    """Rows of a StackDataset."""

    def __init__(self, dataset: StackDataset[Any], rows: Sequence[Rows]) -> None:
        self._dataset = dataset
        self._members = _members_of(dataset)
        self._rows = rows
        self.sample_size = sum(each.sample_size for each in rows)

    def take(self, indices: Sequence[int]) -> Any:
        """Return a batch; see `Rows`."""
        # Two tensors that are not the same object cannot be compared, which is an error as well.
        if _members_of(self._dataset) != self._members:
            raise LookupError("The dataset has other members now.")
        batches = [rows.take(indices) for rows in self._rows]
        if isinstance(self._dataset.datasets, dict):
            return dict(zip(self._dataset.datasets, batches, strict=True))
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
        return {name: _merged([piece[name] for piece in pieces], places, size) for name in first}
    if isinstance(first, list):
        return [_merged(members, places, size) for members in zip(*pieces, strict=True)]
    merged = first.new_empty((size, *first.shape[1:]))
    for piece, rows in zip(pieces, places, strict=True):
        merged.index_copy_(0, rows, piece)
    return merged
