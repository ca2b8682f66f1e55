"""Notes on the error of a step: the layer, its input, the labels, the entries of the batch.

The error stays what it is; a note stands below its message (`BaseException.add_note`). Only what the trainer knows
better than torch is said.
"""

import re
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.parallel.batches.splitting import entries_of

__all__ = ["add_note_on_loading", "add_notes"]

_MOST_ENTRIES = 6


def add_notes(error: BaseException, module: nn.Module, batch: Any) -> None:
    """Add what is known about an error that a step raised.

    Args:
        error: The error, with its traceback.
        module: The user's module.
        batch: The batch that was being computed.
    """
    message = str(error)
    notes = [_layer(error.__traceback__, module)]
    if isinstance(error, TypeError) and "must be Tensor, not" in message:
        notes.append(_no_tensors(batch))
    if isinstance(error, IndexError) and re.search(r"out of (bounds|range)", message):
        notes.append(_integers(batch))
    for note in filter(None, notes):
        if note not in getattr(error, "__notes__", ()):  # a step may lie within another one
            error.add_note(note)


def add_note_on_loading(error: BaseException) -> None:
    """Add what is known about an error that a loader raised.

    Args:
        error: Any error of a run.
    """
    if "stack expects each tensor to be equal size" not in str(error):
        return
    if any(frame.f_code.co_name.startswith("collate") for frame in _frames(error.__traceback__)) or (
        "collate" in str(error)  # of a worker process, whose traceback is part of the message
    ):
        error.add_note(
            "Samples of different shapes cannot be stacked to a batch. Give the DataLoader a `collate_fn` that pads"
            " them, such as with `torch.nn.utils.rnn.pad_sequence`, or that returns a list."
        )


def _layer(traceback: TracebackType | None, module: nn.Module) -> str | None:
    """Name the submodule whose forward raised the error, and what it was called with."""
    innermost: FrameType | None = None
    for frame in _frames(traceback):
        if frame.f_code.co_name == "forward" and isinstance(frame.f_locals.get("self"), nn.Module):
            innermost = frame
    if innermost is None:
        return None
    layer = innermost.f_locals["self"]
    names = {submodule: name for name, submodule in module.named_modules()}
    name = names.get(layer)
    if not name:  # the module itself, whose line the traceback shows, or one that is not part of it
        return None
    arguments = innermost.f_code.co_varnames[1 : innermost.f_code.co_argcount]
    described = [
        f"{argument} of {_described(innermost.f_locals[argument])}"
        for argument in arguments
        if isinstance(innermost.f_locals.get(argument), Tensor)
    ]
    received = f" It was called with {', '.join(described)}." if described else ""
    return f"Raised in the submodule {name!r}: {_one_line(layer)}.{received}"


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _one_line(layer: nn.Module) -> str:
    text = repr(layer)
    return text if "\n" not in text else type(layer).__name__


def _no_tensors(batch: Any) -> str | None:
    """Describe a batch that holds something else than tensors."""
    kinds = [f"batch{path} is {kind}" for path, kind in _others(batch)]
    if not kinds:
        if isinstance(batch, Tensor):
            return None
        return (
            f"The batch is {_described(batch)}: layers take its entries, such as `batch[0]`. Without a `predict_step`,"
            " `predict` hands the whole batch to `forward`."
        )
    listed = "; ".join(kinds[:_MOST_ENTRIES])
    return (
        f"The batch does not hold tensors alone: {listed}. Convert them in the dataset or in the loader's `collate_fn`."
    )


def _others(batch: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the entries of a batch that are no tensors and hold none."""
    if isinstance(batch, dict):
        for key, value in batch.items():
            yield from _others(value, f"{path}[{key!r}]")
    elif isinstance(batch, tuple | list) and batch and not isinstance(batch[0], str | int | float):
        for index, value in enumerate(batch):
            yield from _others(value, f"{path}[{index}]")
    elif not isinstance(batch, Tensor):
        yield path, _described(batch)


def _integers(batch: Any) -> str | None:
    """Say between which bounds the integers of a batch lie: labels and indices."""
    ranges = [
        f"batch{path} from {int(tensor.min())} to {int(tensor.max())}"
        for path, tensor in entries_of(batch)
        if tensor.numel() and not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
    ]
    if not ranges:
        return None
    return f"Integers in the batch: {'; '.join(ranges[:_MOST_ENTRIES])}. Labels must lie below the number of classes."


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"shape {list(value.shape)}, {value.dtype}"
    if isinstance(value, tuple | list):
        kinds = sorted({type(item).__name__ for item in value})
        return f"a {type(value).__name__} of {len(value)} {' and '.join(kinds)}"
    return f"of type {type(value).__name__}"
