"""Batches whose sequences are divided over the processes of a row."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from equipoise.errors import StepError
from equipoise.extensions.fsdp.mesh.context.sequence_row import SequenceRow
from equipoise.tree import map_leaves, rebuild, tensors_in

__all__ = ["divide"]


def divide(batch: Any, row: SequenceRow, module: nn.Module) -> Any:
    """Return the part of a batch that this process has, and note the length of the sequences in the row.

    Divided are all tensors whose second dimension has the length of `input_ids`, or, in a batch without this entry, of
    the first tensor of two dimensions or more. A method `context_dims(batch)` of the module decides otherwise: it
    returns the dimension of each entry that is divided.

    Args:
        batch: The whole batch.
        row: The processes that have parts of the sequences.
        module: The user's module.

    Raises:
        StepError: If no tensor has a sequence, its length cannot be divided evenly, or another sequence has as many
            positions as a part.
    """
    dims_of = getattr(module, "context_dims", None)
    if dims_of is not None:
        return _divide_entries(batch, row, dims_of(batch))
    _begin(row, _length(batch))

    def own_part(leaf: Any) -> Any:
        is_sequence = isinstance(leaf, Tensor) and leaf.ndim > 1
        if is_sequence and leaf.size(1) == row.length:
            return row.own_part(leaf, 1)
        if is_sequence:
            row.check_whole(leaf)
        return leaf

    return map_leaves(own_part, batch)


def _length(batch: Any) -> int:
    """Return the length of the sequences of a batch."""
    if isinstance(batch, Mapping) and "input_ids" in batch:
        batch = batch["input_ids"]
    for tensor in tensors_in(batch):
        if tensor.ndim > 1:
            return tensor.size(1)
    raise StepError(
        "FSDPStrategy(context=...) divides the sequences of a batch, but no tensor of this one has two dimensions or"
        " more: (samples, positions, ...). Let the data have some, name blocks in context_blocks, or leave context out."
    )


def _divide_entries(batch: Any, row: SequenceRow, dims: Any) -> Any:
    """Return the part of this process of a batch of which the module says what is divided."""
    # 1. The entries by key or index, and their dimensions.
    is_mapping = isinstance(batch, Mapping)
    has_entries = is_mapping or isinstance(batch, Sequence)
    if not has_entries or not isinstance(dims, Mapping) or not dims:
        raise StepError(
            "`context_dims(batch)` returns the dimension of positions of each entry that is divided, by its key or"
            f" index in the batch, such as {{'tokens': 1}}, but {dims!r} came for a batch of type"
            f" {type(batch).__name__}."
        )
    entries: dict[Any, Any] = {}
    if is_mapping:
        entries.update(batch)
    else:
        entries.update(enumerate(batch))

    # 2. Their parts.
    first = next(iter(dims))
    _begin(row, entries[first].size(dims[first]))
    for key, dim in dims.items():
        length = entries[key].size(dim)
        if length != row.length:
            raise StepError(
                f"`context_dims` divides {key!r} along dimension {dim}, whose length is {length}, but sequences have"
                f" {row.length} positions. All of them need the same number."
            )
        entries[key] = row.own_part(entries[key], dim)
    return rebuild(batch, list(entries.values()))


def _begin(row: SequenceRow, length: int) -> None:
    """Note the length of the sequences of a batch."""
    pieces = 2 * row.size
    if not length or length % pieces:
        raise StepError(
            f"Sequences of {length} positions are not divided evenly: with context={row.size} the length is a multiple"
            f" of {pieces}. Pad them, with labels of -100; collators of transformers take pad_to_multiple_of={pieces}."
            " Images, sound and sequences of any length are divided between blocks, in context_blocks=['**.layers']."
        )
    row.begin(length)
