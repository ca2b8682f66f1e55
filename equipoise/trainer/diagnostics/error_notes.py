"""Notes on the error of a step: the layer, its input, the labels, the entries of the batch.

The error itself does not change; Python prints a note below its message (`BaseException.add_note`). Notes contain only
facts that the trainer knows better than torch.
"""

import re
from collections.abc import Iterable, Iterator
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.tree import entries_of

__all__ = ["add_notes"]

# Number of entries of a batch that a note describes.
_MOST_ENTRIES = 6

# Part of torch's messages for an index beyond the size, such as a label beyond the number of classes.
_OUT_OF_RANGE = re.compile(r"out of (bounds|range)")

_OF_INFERENCE = (
    "The step uses a tensor that was made in `validate`, `test` or `predict`, under `torch.inference_mode`, and kept"
    " since. Pass Trainer(inference_mode=False) there, or use its `clone()` here."
)


def add_notes(error: BaseException, module: nn.Module, batch: Any) -> None:
    """Add notes to an error that a step has raised: the submodule, and the contents of the batch.

    Args:
        error: The error, with its traceback.
        module: The user's module.
        batch: The batch of the step.
    """
    # 1. Find the layer, and the facts about the batch that bear on this error.
    message = str(error)
    notes = [_layer(error.__traceback__, module)]
    if isinstance(error, TypeError) and "must be Tensor, not" in message:
        notes.append(_no_tensors(batch))
    if isinstance(error, IndexError) and _OUT_OF_RANGE.search(message):
        notes.append(_integers(batch))
    if "inference tensor" in message.lower():
        notes.append(_OF_INFERENCE)
    is_sample = isinstance(batch, str | bytes | int | float)
    is_unpacked = isinstance(error, ValueError) and "to unpack" in message
    if is_sample and isinstance(error, TypeError | AttributeError):
        notes.append(_no_batch(batch))
    if is_unpacked and isinstance(batch, Tensor | str | bytes):
        notes.append(_no_batch(batch))

    # 2. Add the notes. A step may run within another one, which adds the same notes.
    existing_notes = getattr(error, "__notes__", ())
    for note in notes:
        if note and note not in existing_notes:
            error.add_note(note)


def _layer(traceback: TracebackType | None, module: nn.Module) -> str | None:
    """Return a text with the submodule whose forward has raised the error, and with the tensors that it received."""
    # 1. Find the innermost forward.
    innermost: FrameType | None = None
    layer: nn.Module | None = None
    for frame, _ in walk_tb(traceback):
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(owner, nn.Module):
            innermost = frame
            layer = owner
    if innermost is None or layer is None:
        return None

    # 2. Find its name. The module itself has none, and the traceback shows its line anyway.
    names = {submodule: name for name, submodule in module.named_modules()}
    name = names.get(layer)
    if not name:
        return None

    # 3. Describe its arguments.
    code = innermost.f_code
    descriptions = []
    for argument in code.co_varnames[1 : code.co_argcount]:
        value = innermost.f_locals.get(argument)
        if isinstance(value, Tensor):
            descriptions.append(f"{argument} of {_described(value)}")
    received = ""
    if descriptions:
        received = f" It was called with {', '.join(descriptions)}."
    return f"Raised in the submodule {name!r}: {_one_line(layer)}.{received}"


def _one_line(layer: nn.Module) -> str:
    text = repr(layer)
    # A module with submodules has several lines.
    return type(layer).__name__ if "\n" in text else text


def _no_tensors(batch: Any) -> str | None:
    """Return a text about the entries of a batch that are no tensors."""
    kinds = [f"batch{path} is {kind}" for path, kind in _other_entries(batch)]
    if not kinds:
        if isinstance(batch, Tensor):
            return None
        # All entries are tensors, so the batch itself is the argument of a layer.
        return (
            f"The batch is {_described(batch)}: layers take its entries, such as `batch[0]`. Without a `predict_step`,"
            " `predict` hands the whole batch to `forward`."
        )
    listed = "; ".join(kinds[:_MOST_ENTRIES])
    return (
        f"The batch does not hold tensors alone: {listed}. Convert them in the dataset or in the loader's `collate_fn`."
    )


def _no_batch(batch: Any) -> str:
    """Return a text about a batch that is one tensor, number or text, as of a list that was passed as a loader."""
    return (
        f"The batch is {'of ' * isinstance(batch, Tensor)}{_described(batch)}: each item that a loader gives is a"
        " batch. To make batches of samples, pass a `DataLoader(samples, batch_size=...)`."
    )


def _other_entries(batch: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the paths and descriptions of the entries of a batch that are no tensors and hold none."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(batch, dict):
        items = batch.items()
    elif isinstance(batch, tuple | list) and batch and not isinstance(batch[0], str | int | float):
        items = enumerate(batch)
    elif not isinstance(batch, Tensor):
        yield path, _described(batch)
    for key, value in items:
        yield from _other_entries(value, f"{path}[{key!r}]")


def _integers(batch: Any) -> str | None:
    """Return a text with the ranges of the integers in a batch, which may be labels or indices."""
    ranges = []
    for path, tensor in entries_of(batch):
        is_integral = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
        if tensor.numel() and is_integral:
            least = int(tensor.min())
            most = int(tensor.max())
            ranges.append(f"batch{path} from {least} to {most}")
    if not ranges:
        return None
    return f"Integers in the batch: {'; '.join(ranges[:_MOST_ENTRIES])}. Labels must lie below the number of classes."


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"shape {list(value.shape)}, {value.dtype}"
    kind = type(value).__name__
    if isinstance(value, tuple | list):
        kinds_of_items = {type(item).__name__ for item in value}
        return f"a {kind} of {len(value)} {' and '.join(sorted(kinds_of_items))}"
    return f"of type {kind}"
