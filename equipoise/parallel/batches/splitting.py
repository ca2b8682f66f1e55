"""Split nested batches into parts, and find their sizes.

A batch may be a tensor, or tensors in tuples, named tuples, lists, mappings (`UserDict` among them) and dataclasses,
nested at will. Its tensors are cut along one dimension that all of them share; what is no tensor, and tensors without
dimensions, belong to every part. A batch is never cut by guess: where no size can be told safely, the module says it,
by a method `batch_size(batch)`, and cuts, by a method `split_batch(batch, sizes)`.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from equipoise.errors import StepError

__all__ = ["Splitter", "entries_of", "holds_samples", "infer_batch_size", "rebuild", "size_to_cut", "split", "why_not"]


def entries_of(batch: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of a nested batch in order, with the way to it, such as `[0]['mask']`."""
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
            yield from entries_of(getattr(batch, field.name), f"{path}.{field.name}")


def infer_batch_size(batch: Any, dim: int = 0) -> int | None:
    """Returns the size that all tensors of a batch share; None if they share none, or nobody can tell.

    Tensors without dimensions are passed over: they belong to the whole batch.

    Args:
        batch: A nested batch.
        dim: The dimension of the samples. Default: the first.
    """
    if dim == 0 and type(batch) in (tuple, list) and len(batch) == 2:
        first, second = batch  # (input, target): nine batches of ten, and half the time
        if type(first) is Tensor and type(second) is Tensor and first.ndim and second.ndim:
            size = first.size(0)
            return size if second.size(0) == size else None
    sizes = set(_lengths_of(batch, dim))
    return sizes.pop() if len(sizes) == 1 else None


def _lengths_of(batch: Any, dim: int) -> Iterator[int | None]:
    """Yield the length of every tensor of a batch along a dimension, None where it has no such dimension."""
    if isinstance(batch, Tensor):
        if batch.ndim:
            # Not shape[dim], which a tensor of nested layout does not have.
            yield batch.size(dim) if batch.ndim > dim else None
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _lengths_of(value, dim)
    elif isinstance(batch, PackedSequence):
        yield int(batch.batch_sizes[0])  # which lies on the CPU; its data are as long as all samples together
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from _lengths_of(value, dim)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from _lengths_of(getattr(batch, field.name), dim)


def size_to_cut(batch: Any, dim: int = 0, *, cut_before: bool = False) -> int | None:
    """The same for a batch that is to be cut; None also where the dimension that tensors share may mean something else.

    Args:
        batch: A nested batch.
        dim: The dimension of the samples. Default: the first.
        cut_before: Whether another batch of its kind has been cut, so that equal images cannot be what its lists hold.
    """
    return None if holds_samples(batch, cut_before) else infer_batch_size(batch, dim)


def holds_samples(batch: Any, cut_before: bool = False) -> bool:
    """Return whether a batch holds whole samples, whose first dimensions may be equal without being that of the batch.

    Such are packed sequences and lists of images, `[C, H, W]` each. A list of two equal tensors `[3, H, W]` may as well
    be inputs and targets of three samples, as a loader gives them at the end of an epoch.
    """
    if isinstance(batch, PackedSequence):
        return True
    if isinstance(batch, list) and batch and all(type(item) is Tensor and item.ndim == 3 for item in batch):
        first, equal = {item.size(0) for item in batch}, len({item.shape for item in batch}) == 1
        return (not cut_before and first <= {3, 4}) if equal else first <= {1, 3, 4}
    if isinstance(batch, Mapping):
        return any(holds_samples(value, cut_before) for value in batch.values())
    return isinstance(batch, (tuple, list)) and any(holds_samples(value, cut_before) for value in batch)


def split(batch: Any, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    """Cuts a batch whose size `infer_batch_size` told into parts, which are views.

    Args:
        batch: A nested batch.
        sizes: The sizes of the parts; their sum is the size of the batch.
        dim: The dimension of the samples. Default: the first.
    """
    if isinstance(batch, Tensor):
        return list(torch.split(batch, list(sizes), dim)) if batch.ndim else [batch] * len(sizes)
    if isinstance(batch, Mapping):
        cut: list[Any] = [split(value, sizes, dim) for value in batch.values()]
    elif isinstance(batch, (tuple, list)):
        cut = [split(value, sizes, dim) for value in batch]
    elif is_dataclass(batch) and not isinstance(batch, type):
        cut = [split(getattr(batch, field.name), sizes, dim) for field in fields(batch)]
    else:
        return [batch] * len(sizes)
    return [rebuild(batch, [values[part] for values in cut]) for part in range(len(sizes))]


def rebuild(like: Any, values: Sequence[Any]) -> Any:
    """A container like another, with other values.

    Args:
        like: A mapping, tuple, named tuple, list or dataclass.
        values: In the order of its items.
    """
    if isinstance(like, Mapping):
        items = dict(zip(like, values, strict=True))
        try:
            other: Any = copy.copy(like)
            for key, value in items.items():  # not `update`, which outputs of transformers' models refuse
                other[key] = value
        except (AttributeError, TypeError):  # a mapping that cannot be written to
            return items
        return other
    if isinstance(like, tuple):
        return type(like)(*values) if hasattr(like, "_fields") else type(like)(values)
    if isinstance(like, list):
        return type(like)(values)
    other = copy.copy(like)
    for field, value in zip(fields(like), values, strict=True):
        object.__setattr__(other, field.name, value)  # the dataclass may be frozen
    return other


_WAY_OUT = (
    " Define `batch_size(self, batch)`, which returns the number of samples, and `split_batch(self, batch, sizes)`,"
    " which returns the parts, in your module."
)


class Splitter:
    """Cuts batches as the module says, or along a dimension.

    Args:
        module: The user's module, which may define `batch_size(batch)` and `split_batch(batch, sizes)`.
        dim: The dimension of the samples. Default: the first.
    """

    def __init__(self, module: Any, dim: int = 0) -> None:
        self.dim = dim
        self._size: Callable[[Any], Any] | None = _method(module, "batch_size", 1)
        self._split: Callable[[Any, list[int]], Any] | None = _method(module, "split_batch", 2)
        self._cut_before = False

    @property
    def asks_module(self) -> bool:
        """Whether the module says how many samples a batch has."""
        return self._size is not None

    def size(self, batch: Any) -> int | None:
        """The number of samples; None if nobody can tell.

        Raises:
            StepError: If the module's method returns something else.
        """
        if self._size is None:
            return infer_batch_size(batch, self.dim)
        size = self._size(batch)
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise StepError(f"`batch_size(batch)` of the module must return the number of samples, not {size!r}.")
        return size

    def size_to_cut(self, batch: Any) -> int:
        """The number of samples of a batch that must be cut.

        Raises:
            StepError: If nobody can tell it, naming the entries that stand in the way.
        """
        size = self.size(batch)
        if size is None or (self._split is None and holds_samples(batch, self._cut_before)):
            raise StepError(why_not(batch, self.dim, "A batch") + _WAY_OUT)
        if self._split is None and self._size is not None and (found := infer_batch_size(batch, self.dim)) != size:
            raise StepError(
                f"`batch_size(batch)` says {size}, but the tensors of the batch are of length {found} along dimension"
                f" {self.dim}. Define `split_batch(self, batch, sizes)` in your module, which returns the parts."
            )
        self._cut_before = True
        return size

    def parts(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """Cuts a batch.

        Args:
            batch: The batch.
            sizes: The sizes of the parts, none of them 0.

        Raises:
            StepError: If the module's method returns another number of parts.
        """
        if self._split is None:
            return split(batch, sizes, self.dim)
        parts = list(self._split(batch, list(sizes)))
        if len(parts) != len(sizes):
            raise StepError(
                f"`split_batch(batch, sizes={list(sizes)})` of the module must return {len(sizes)} parts, but returned"
                f" {len(parts)}."
            )
        return parts


def _method(module: Any, name: str, arguments: int) -> Callable[..., Any] | None:
    """The module's method, if it is one that takes so many arguments; others of the same name mean something else."""
    own = getattr(module, name, None)
    if not callable(own):
        return None
    try:
        inspect.signature(own).bind(*range(arguments))
    except TypeError:
        return None
    return own  # type: ignore[no-any-return]


def why_not(batch: Any, dim: int, what: str, name: str = "batch") -> str:
    """Why something cannot be cut.

    Args:
        batch: A nested batch whose size cannot be told.
        dim: The dimension of the samples.
        what: How to call it.
        name: How to call it in the names of its entries.
    """
    entries = [(f"{name}{path}", tensor) for path, tensor in entries_of(batch) if tensor.ndim]
    if not entries:
        return f"{what} must be cut into parts, but there is no tensor in this {type(batch).__name__}."
    if holds_samples(batch):
        return (
            f"{what} must be cut into parts, but it holds whole samples, as a list of images or a packed sequence does,"
            f" and what belongs together cannot be told: {_listed(entries, dim)}."
        )
    return f"{what} must be cut along dimension {dim}, but its tensors differ there: {_listed(entries, dim)}."


def _listed(entries: list[tuple[str, Tensor]], dim: int) -> str:
    told = [
        f"{name} is of length {tensor.size(dim)}" if tensor.ndim > dim else f"{name} has {tensor.ndim} dimensions"
        for name, tensor in entries
    ]
    return ", ".join(told[:6]) + (f", and {len(told) - 6} more" if len(told) > 6 else "")
