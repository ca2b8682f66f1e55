"""Split nested batches into parts, and find their sizes.

A batch may be a tensor, or tensors in tuples, named tuples, lists, mappings (`UserDict` among them) and dataclasses,
nested to any depth. Its tensors are cut along one dimension, in which all of them have the same size. Every part gets
all values that are no tensors, and all tensors without dimensions. A batch is never cut by guess: where the tensors do
not show the size safely, the module defines it by a method `batch_size(batch)`, and cuts by a method
`split_batch(batch, sizes)`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from equipoise.errors import StepError
from equipoise.tree import entries_of, items_of, rebuild
from equipoise.validation import is_whole

__all__ = ["Splitter", "holds_samples", "infer_batch_size", "split", "why_not"]

_WAY_OUT = (
    " Define `batch_size(self, batch)`, which returns the number of samples, and `split_batch(self, batch, sizes)`,"
    " which returns the parts, in your module."
)
_ANOTHER_WAY_OUT = _WAY_OUT.replace(" Define", " Or define", 1)
# Number of tensors that a message describes.
_MOST_DESCRIBED = 6


def infer_batch_size(batch: Any, dim: int = 0) -> int | None:
    """Return the size that all tensors of a batch share; None if their sizes differ, or if there are no tensors.

    Tensors without dimensions are ignored: they belong to the whole batch.

    Args:
        batch: A nested batch.
        dim: The dimension of the samples. Default: the first.
    """
    # A pair (input, target) is the usual batch. Comparing its sizes directly takes half the time.
    if dim == 0 and type(batch) in (tuple, list) and len(batch) == 2:
        first, second = batch
        if type(first) is Tensor and type(second) is Tensor and first.ndim and second.ndim:
            size = first.size(0)
            if second.size(0) != size:
                return None
            return size
    sizes: set[int | None] = set()
    _add_sizes(batch, dim, sizes)
    if len(sizes) != 1:
        return None
    return sizes.pop()


def _add_sizes(batch: Any, dim: int, sizes: set[int | None]) -> None:
    """Add the size of every tensor of a batch along a dimension, None for a tensor without such a dimension."""
    if isinstance(batch, Tensor):
        if batch.ndim > dim:
            # Not shape[dim], which a tensor of nested layout does not have.
            size = batch.size(dim)
            sizes.add(size)
        elif batch.ndim:
            sizes.add(None)
        return
    if isinstance(batch, PackedSequence):
        # Its data are as long as all samples together. The batch sizes lie on the CPU: reading them does not
        # synchronise a device.
        size = int(batch.batch_sizes[0])
        sizes.add(size)
        return
    items = items_of(batch)
    if items is not None:
        for item in items:
            _add_sizes(item, dim, sizes)


def holds_samples(batch: Any, cut_before: bool = False) -> bool:
    """Return whether a batch holds whole samples, whose first dimensions may be equal without being that of the batch.

    Such are packed sequences and lists of images, `[C, H, W]` each. A list of two equal tensors `[3, H, W]` may as well
    be inputs and targets of three samples, as a loader yields them at the end of an epoch.

    Args:
        batch: A nested batch.
        cut_before: True if another batch of this kind was cut before. Then a list of tensors of equal shape does not
            hold images. Default: False.
    """
    if isinstance(batch, PackedSequence):
        return True
    if isinstance(batch, Mapping):
        return any(holds_samples(value, cut_before) for value in batch.values())
    if not isinstance(batch, (tuple, list)):
        return False
    if isinstance(batch, list) and batch and all(map(_may_be_image, batch)):
        return _are_images(batch, cut_before)
    return any(holds_samples(value, cut_before) for value in batch)


def _may_be_image(item: Any) -> bool:
    if type(item) is not Tensor:
        return False
    return item.ndim == 3


def _are_images(tensors: list[Tensor], cut_before: bool) -> bool:
    """Return whether tensors of three dimensions are images rather than tensors of all samples."""
    channels = {tensor.size(0) for tensor in tensors}
    shapes = {tensor.shape for tensor in tensors}
    if len(shapes) > 1:
        return channels <= {1, 3, 4}
    # Tensors of equal shape may also be inputs and targets of as many samples as images have channels.
    if cut_before:
        return False
    return channels <= {3, 4}


def split(batch: Any, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    """Cut a batch whose size `infer_batch_size` returned into parts, which are views.

    Args:
        batch: A nested batch.
        sizes: The sizes of the parts; their sum is the size of the batch.
        dim: The dimension of the samples. Default: the first.

    Raises:
        StepError: If it holds a packed sequence, whose tensors are ordered by step and not by sample.
    """
    if isinstance(batch, Tensor) and batch.ndim:
        return list(torch.split(batch, list(sizes), dim))
    if isinstance(batch, PackedSequence):
        raise StepError(
            "A batch must be cut into parts, but it holds a PackedSequence, which is ordered by step and not by sample."
            " Let the loader return the padded sequences and their lengths, and pack them within the module."
            + _ANOTHER_WAY_OUT
        )

    items = items_of(batch)
    if items is None:
        # No container: the value belongs to every part.
        return [batch] * len(sizes)

    # Each item in parts, and a container like the batch for each part.
    items_in_parts = [split(item, sizes, dim) for item in items]
    return [rebuild(batch, [item_parts[index] for item_parts in items_in_parts]) for index in range(len(sizes))]


class Splitter:
    """Cuts batches as the module defines, or along a dimension.

    Args:
        module: The user's module, which may define `batch_size(batch)` and `split_batch(batch, sizes)`.
        dim: The dimension of the samples. Default: the first.
    """

    def __init__(self, module: Any, dim: int = 0) -> None:
        self.dim = dim
        # The methods of the module; None if it does not define them.
        self._batch_size = _method(module, "batch_size", 1)
        self._split_batch = _method(module, "split_batch", 2)
        # True once a batch of this kind was cut.
        self._has_cut = False

    @property
    def asks_module(self) -> bool:
        """True if the module defines `batch_size(batch)`."""
        return self._batch_size is not None

    def size(self, batch: Any) -> int | None:
        """Return the number of samples; None if neither the module nor the tensors show it.

        Raises:
            StepError: If the module's method returns something else.
        """
        if self._batch_size is None:
            return infer_batch_size(batch, self.dim)
        size = self._batch_size(batch)
        if is_whole(size, least=0):
            return size
        raise StepError(f"`batch_size(batch)` of the module must return the number of samples, not {size!r}.")

    def size_of_drawn(self, batch: Any, drawn: int | None) -> int | None:
        """Return the number of samples; where neither the module nor the tensors show it, the number drawn.

        Args:
            batch: The batch.
            drawn: The number of samples that the loader has drawn for it; None if that is unknown.
        """
        size = self.size(batch)
        if drawn is None or self.asks_module:
            return size
        # The first dimensions of whole samples may be equal by chance.
        if size is None or holds_samples(batch):
            return drawn
        return size

    def size_to_cut(self, batch: Any) -> int:
        """Return the number of samples of a batch that must be cut.

        Raises:
            StepError: If the size cannot be found. The message names the entries that differ.
        """
        size = self.size(batch)
        if size is None:
            raise self._unknown_size(batch)
        # The module cuts by itself, so the tensors may have any size.
        if self._split_batch is not None:
            self._has_cut = True
            return size
        if holds_samples(batch, self._has_cut):
            raise self._unknown_size(batch)
        if self._batch_size is not None:
            length = infer_batch_size(batch, self.dim)
            if length != size:
                raise StepError(
                    f"`batch_size(batch)` says {size}, but the tensors of the batch are of length {length} along"
                    f" dimension {self.dim}. Define `split_batch(self, batch, sizes)` in your module, which returns the"
                    " parts."
                )
        self._has_cut = True
        return size

    def _unknown_size(self, batch: Any) -> StepError:
        return StepError(why_not(batch, self.dim, "A batch") + _WAY_OUT)

    def parts(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """Cut a batch into parts.

        Args:
            batch: The batch.
            sizes: The sizes of the parts, none of them 0.

        Raises:
            StepError: If the module's method returns another number of parts.
        """
        if self._split_batch is None:
            return split(batch, sizes, self.dim)
        sizes = list(sizes)
        # A copy, which the method may change.
        parts = list(self._split_batch(batch, sizes.copy()))
        if len(parts) != len(sizes):
            raise StepError(
                f"`split_batch(batch, sizes={sizes})` of the module must return {len(sizes)} parts, but returned"
                f" {len(parts)}."
            )
        return parts


def _method(module: Any, name: str, arguments: int) -> Callable[..., Any] | None:
    """Return the module's method if it takes this number of arguments. Others of its name have another meaning."""
    method = getattr(module, name, None)
    if not callable(method):
        return None
    try:
        inspect.signature(method).bind(*range(arguments))
    except TypeError:
        return None
    return method  # type: ignore[no-any-return]


def why_not(
    batch: Any,
    dim: int,
    what: str,
    name: str = "batch",
) -> str:
    """Return the reason why a batch cannot be cut, as a sentence.

    Args:
        batch: A nested batch of unknown size.
        dim: The dimension of the samples.
        what: The subject of the sentence, such as "A batch".
        name: The name of the batch in the paths of its entries. Default: "batch".
    """
    lengths = []
    for path, tensor in entries_of(batch):
        # A tensor without dimensions belongs to every part, so it is no obstacle.
        if tensor.ndim > dim:
            lengths.append(f"{name}{path} is of length {tensor.size(dim)}")
        elif tensor.ndim:
            lengths.append(f"{name}{path} has {tensor.ndim} dimensions")
    if not lengths:
        return f"{what} must be cut into parts, but there is no tensor in this {type(batch).__name__}."
    text = _listed(lengths)
    if holds_samples(batch):
        return (
            f"{what} must be cut into parts, but it holds whole samples, as a list of images or a packed sequence does,"
            f" and what belongs together cannot be told: {text}."
        )
    return f"{what} must be cut along dimension {dim}, but its tensors differ there: {text}."


def _listed(lengths: list[str]) -> str:
    """Join the first descriptions, and count the rest."""
    text = ", ".join(lengths[:_MOST_DESCRIBED])
    rest = len(lengths) - _MOST_DESCRIBED
    if rest > 0:
        text += f", and {rest} more"
    return text
