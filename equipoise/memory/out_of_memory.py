"""Errors of allocators: how they are recognised, and what they tell."""

import re
from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["OutOfMemoryEvent", "Phase", "Split", "device_of", "free_bytes", "is_out_of_memory", "requested_bytes"]

Phase = Literal["forward", "backward", "optimizer step", "evaluation"]

_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
)
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)|you tried to allocate (\d+) bytes")
_FREE = re.compile(r"of which ([\d.]+) (bytes|KiB|MiB|GiB) is free")
_DEVICE = re.compile(r"GPU (\d+) has a total capacity")


@dataclass(frozen=True, kw_only=True)
class OutOfMemoryEvent:
    """A batch that did not fit.

    Attributes:
        phase: What ran: "forward", "backward", "optimizer step" or "evaluation".
        device: The device that ran out, as torch names it.
        batch_idx: The number of the batch.
        batch_size: Its number of samples; None if nobody can tell.
        parts: In how many parts it was computed when memory ran out.
        most_parts: In how many it can be computed at most: one sample each.
        obstacle: Why it cannot be cut; empty if it can.
        requested: The bytes that were asked for; None if the error does not say.
        free: The bytes that were free on the device; None if the error does not say.
        message: What the allocator said.
        global_rank: The process.
    """

    phase: Phase
    device: str
    batch_idx: int
    batch_size: int | None
    parts: int
    most_parts: int
    obstacle: str
    requested: int | None
    free: int | None
    message: str
    global_rank: int = 0


@dataclass(frozen=True)
class Split:
    """An answer to an event: compute the batch in parts.

    Attributes:
        parts: In how many. 0: leave the batch out.
        grow_after: After how many good batches of its kind parts twice as large are tried; 0: never. Default: 100.
    """

    parts: int
    grow_after: int = 100


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on whatever device.

    Example:
        >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory.")), is_out_of_memory(ValueError())
        (True, False)
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def requested_bytes(message: str) -> int | None:
    """How much was asked for, as an allocator's message has it."""
    return _bytes(_ASKED.search(message))


def free_bytes(message: str) -> int | None:
    """How much was free, as an allocator's message has it."""
    return _bytes(_FREE.search(message))


def device_of(message: str) -> str | None:
    """Which device ran out, as an allocator's message has it."""
    found = _DEVICE.search(message)
    return f"cuda:{found[1]}" if found else None


def _bytes(found: re.Match[str] | None) -> int | None:
    if found is None:
        return None
    number, unit = (found[1], found[2]) if found[1] else (found[3], "bytes")
    return int(float(number) * _UNITS[unit])
