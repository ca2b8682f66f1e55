"""Batches of datasets that lie in memory, whose rows are taken at once.

A DataLoader reads a TensorDataset sample by sample, and stacks the samples. For a small batch this takes as long as the
step that trains on it. One operation for each tensor returns the same batch, to the bit.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

__all__ = ["Rows", "rows_of"]


class Rows(Protocol):
    """Rows of a dataset in memory. Classes can be pickled, for workers of loaders."""

    def take(self, indices: Sequence[int]) -> Any:
        """Return the collated batch of some samples: a tensor, or lists and dictionaries of tensors.

        Args:
            indices: Numbers of the samples, without negative ones.

        Raises:
            Exception: If the batch must be read sample by sample. That also reports what is wrong with the indices.
        """
        ...


def rows_of(dataset: Any) -> Rows | None:
    """Return the rows of a dataset; None if they do not lie in memory, or if a class is not torch's own.

    Args:
        dataset: A TensorDataset, or a Subset, ConcatDataset or StackDataset of such datasets; a StackDataset may also
            hold tensors.

    Example:
        >>> dataset = TensorDataset(torch.arange(3), torch.arange(6).view(3, 2))
        >>> rows_of(dataset).take([2, 0])
        [tensor([2, 0]), tensor([[4, 5],
                [0, 1]])]
    """
    kind = type(dataset)
    # A subclass may read its samples in another way.
    if kind is TensorDataset and all(map(_lies_in_memory, dataset.tensors)):
        return _TensorRows(dataset)
    if kind is Subset:
        rows = rows_of(dataset.dataset)
        return None if rows is None else _SubsetRows(dataset, rows)
    if kind is ConcatDataset:
        parts = _rows_of_all(dataset.datasets)
        return None if parts is None else _JoinedRows(dataset, parts)
    if kind is StackDataset:
        return _stacked(dataset)
    return None


def _rows_of_all(datasets: Sequence[Any]) -> list[Rows] | None:
    """Return the rows of each dataset; None if one of them has none."""
    all_rows = []
    for dataset in datasets:
        rows = rows_of(dataset)
        if rows is None:
            return None
        all_rows.append(rows)
    return all_rows


def _stacked(dataset: Any) -> Rows | None:
    """Return the rows of a StackDataset."""
    member_rows: list[Rows] = []
    for member in _members_of(dataset):
        rows = _MemberRows(member) if _lies_in_memory(member) else rows_of(member)
        if rows is None:
            return None
        member_rows.append(rows)
    return _StackedRows(dataset, member_rows)


def _members_of(dataset: Any) -> tuple[Any, ...]:
    """Return the datasets and tensors of a StackDataset, which may have names."""
    members = dataset.datasets
    if isinstance(members, dict):
        return tuple(members.values())
    return tuple(members)


def _lies_in_memory(tensor: Any) -> bool:
    """Return True if rows of a tensor can be taken at once, with the same result as one by one."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    # Samples have gradients of their own, and the memory format of a batch follows from that of its samples.
    if tensor.requires_grad or tensor.dim() == 0 or not tensor.is_contiguous():
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def _as_tensor(indices: Sequence[int]) -> Tensor:
    """Return numbers of samples as a tensor."""
    for kind in set(map(type, indices)):
        # True is a number to Python, and a mask to torch.
        if issubclass(kind, bool) or not issubclass(kind, Integral):
            raise TypeError(f"A {kind.__name__} is no number of a sample.")
    return torch.tensor(indices, dtype=torch.int64, device="cpu")


class _TensorRows:
    """Rows of a TensorDataset.

    Args:
        dataset: The dataset.
    """

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset
        self._tensors = dataset.tensors

    def take(self, indices: Sequence[int]) -> list[Tensor]:
        """Return a batch; see `Rows`."""
        if self._dataset.tensors is not self._tensors:
            raise LookupError("The dataset has other tensors now.")
        chosen = _as_tensor(indices)
        return [tensor.index_select(0, chosen) for tensor in self._tensors]


class _MemberRows:
    """Rows of a tensor that is a member of a StackDataset.

    Args:
        tensor: The tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def take(self, indices: Sequence[int]) -> Tensor:
        """Return a batch; see `Rows`."""
        return self._tensor.index_select(0, _as_tensor(indices))


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

    def take(self, indices: Sequence[int]) -> Any:
        """Return a batch; see `Rows`."""
        if self._subset.dataset is not self._selected:
            raise LookupError("The subset selects from another dataset now.")
        selection: Any = self._subset.indices
        if isinstance(selection, Tensor):
            return self._rows.take(selection[list(indices)].tolist())
        return self._rows.take([selection[index] for index in indices])


class _JoinedRows:
    """Rows of a ConcatDataset.

    Args:
        dataset: The dataset.
        parts: Rows of the datasets in it.
    """

    def __init__(self, dataset: ConcatDataset[Any], parts: Sequence[Rows]) -> None:
        self._dataset = dataset
        self._datasets = tuple(dataset.datasets)
        self._parts = parts

    def take(self, indices: Sequence[int]) -> Any:
        """Return a batch; see `Rows`."""
        if tuple(self._dataset.datasets) != self._datasets:
            raise LookupError("The dataset consists of other parts now.")
        ends = self._dataset.cumulative_sizes
        # 1. Find the samples of each part, and their positions in the batch.
        samples: dict[int, list[int]] = {}
        positions: dict[int, list[int]] = {}
        for position, index in enumerate(indices):
            part = bisect_right(ends, index)
            begin = ends[part - 1] if part else 0
            samples.setdefault(part, []).append(index - begin)
            positions.setdefault(part, []).append(position)
        # 2. Put the rows of all parts together. A negative index is out of range in the first part.
        pieces = [self._parts[part].take(samples[part]) for part in samples]
        if len(pieces) == 1:
            return pieces[0]
        places = [torch.tensor(positions[part], device="cpu") for part in samples]
        return _merged(pieces, places, len(indices))


class _StackedRows:
    """Rows of a StackDataset.

    Args:
        dataset: The dataset.
        rows: Rows of its members.
    """

    def __init__(self, dataset: StackDataset[Any], rows: Sequence[Rows]) -> None:
        self._dataset = dataset
        self._members = _members_of(dataset)
        self._rows = rows

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
        pieces: Rows of the batch: tensors, or lists and dictionaries of tensors, all of one structure.
        places: The places of each piece's rows in the batch.
        size: Number of rows of the batch.

    Raises:
        RuntimeError: If the pieces have other shapes or dtypes. Samples would be stacked, or an error says why not.
    """
    first = pieces[0]
    if isinstance(first, Mapping):
        return {name: _merged([piece[name] for piece in pieces], places, size) for name in first}
    if isinstance(first, list):
        return [_merged(members, places, size) for members in zip(*pieces, strict=True)]
    merged = first.new_empty((size, *first.shape[1:]))
    for piece, rows in zip(pieces, places, strict=True):
        merged.index_copy_(0, rows, piece)
    return merged
