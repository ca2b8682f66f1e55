"""Notes on the error of a step: the layer, its input, the labels, the entries of the batch.

The error itself does not change; Python prints a note below its message (`BaseException.add_note`). Notes contain only
facts that the trainer knows better than torch.
"""

import re
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.tree import entries_of

__all__ = ["add_note_on_loading", "add_notes"]

# Number of entries of a batch that a note describes.
_MOST_ENTRIES = 6


def add_notes(error: BaseException, module: nn.Module, batch: Any) -> None:
    """Add notes to an error that a step has raised: the submodule, and the contents of the batch.

    Args:
        error: The error, with its traceback.
        module: The user's module.
        batch: The batch of the step.
    """
    message = str(error)
    notes = [_layer(error.__traceback__, module)]
    if isinstance(error, TypeError) and "must be Tensor, not" in message:
        notes.append(_no_tensors(batch))
    if isinstance(error, IndexError) and re.search(r"out of (bounds|range)", message):
        notes.append(_integers(batch))
    # A step may run within another one, which adds the same notes.
    existing_notes = getattr(error, "__notes__", ())
    for note in notes:
        if note and note not in existing_notes:
            error.add_note(note)


def add_note_on_loading(error: BaseException) -> None:
    """Add a note to an error that a loader has raised, if samples cannot be stacked to a batch.

    Args:
        error: Any error of a run.
    """
    message = str(error)
    if "stack expects each tensor to be equal size" not in message:
        return
    # The message of an error of a worker process contains its traceback.
    functions = [frame.f_code.co_name for frame in _frames(error.__traceback__)]
    is_in_collate = any(name.startswith("collate") for name in functions)
    if is_in_collate or "collate" in message:
        error.add_note(
            "Samples of different shapes cannot be stacked to a batch. Give the DataLoader a `collate_fn` that pads"
            " them, such as with `torch.nn.utils.rnn.pad_sequence`, or that returns a list."
        )


def _layer(traceback: TracebackType | None, module: nn.Module) -> str | None:
    """Return a text with the submodule whose forward has raised the error, and with the tensors that it received."""
    # 1. Find the innermost forward.
    innermost: FrameType | None = None
    for frame in _frames(traceback):
        is_forward = frame.f_code.co_name == "forward"
        if is_forward and isinstance(frame.f_locals.get("self"), nn.Module):
            innermost = frame
    if innermost is None:
        return None

    # 2. Find its name. The module itself has none, and the traceback shows its line anyway.
    layer = innermost.f_locals["self"]
    names = {submodule: name for name, submodule in module.named_modules()}
    name = names.get(layer)
    if not name:
        return None

    # 3. Describe its arguments.
    descriptions = _tensor_arguments(innermost)
    received = ""
    if descriptions:
        received = f" It was called with {', '.join(descriptions)}."
    return f"Raised in the submodule {name!r}: {_one_line(layer)}.{received}"


def _tensor_arguments(frame: FrameType) -> list[str]:
    """Return descriptions of the arguments of a call that are tensors, without `self`."""
    code = frame.f_code
    descriptions = []
    for name in code.co_varnames[1 : code.co_argcount]:
        value = frame.f_locals.get(name)
        if isinstance(value, Tensor):
            descriptions.append(f"{name} of {_described(value)}")
    return descriptions


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _one_line(layer: nn.Module) -> str:
    text = repr(layer)
    # A module with submodules has several lines.
    if "\n" in text:
        return type(layer).__name__
    return text


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


def _other_entries(batch: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the paths and descriptions of the entries of a batch that are no tensors and hold none."""
    if isinstance(batch, dict):
        for key, value in batch.items():
            yield from _other_entries(value, f"{path}[{key!r}]")
    elif isinstance(batch, tuple | list) and not _is_list_of_values(batch):
        for index, value in enumerate(batch):
            yield from _other_entries(value, f"{path}[{index}]")
    elif not isinstance(batch, Tensor):
        yield path, _described(batch)


def _is_list_of_values(batch: Any) -> bool:
    """Return whether a list holds texts or numbers, or nothing; the text describes it as one entry."""
    return not batch or isinstance(batch[0], str | int | float)


def _integers(batch: Any) -> str | None:
    """Return a text with the ranges of the integers in a batch, which may be labels or indices."""
    ranges = []
    for path, tensor in entries_of(batch):
        if tensor.numel() and _is_integral(tensor):
            least = int(tensor.min())
            most = int(tensor.max())
            ranges.append(f"batch{path} from {least} to {most}")
    if not ranges:
        return None
    return f"Integers in the batch: {'; '.join(ranges[:_MOST_ENTRIES])}. Labels must lie below the number of classes."


def _is_integral(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return False
    return tensor.dtype != torch.bool


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"shape {list(value.shape)}, {value.dtype}"
    if isinstance(value, tuple | list):
        kinds = sorted({type(item).__name__ for item in value})
        joined = " and ".join(kinds)
        return f"a {type(value).__name__} of {len(value)} {joined}"
    return f"of type {type(value).__name__}"
