"""Out-of-memory errors of allocators, and the sizes in their messages."""

import re
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from equipoise.errors import CheckpointError, StepError, WorkerError
from equipoise.validation import check_whole

__all__ = [
    "OutOfMemoryEvent",
    "Phase",
    "Split",
    "allocated_bytes",
    "device_of",
    "free_bytes",
    "is_out_of_memory",
    "requested_bytes",
]

Phase = Literal["forward", "backward", "optimizer step", "evaluation", "training step"]

# Texts of errors that mean a lack of memory.
_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    # cuDNN reports these if no algorithm's workspace fits.
    "unable to find an engine to execute this computation",
    "CUDNN_STATUS_NOT_SUPPORTED",
)
_UNITS = {
    "bytes": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}
_SIZE = r"(?P<number>[\d.]+) (?P<unit>bytes|KiB|MiB|GiB)"
# The first form is that of CUDA's allocator, the second that of the CPU's, which has no other unit than bytes.
_REQUESTED = re.compile(rf"[Tt]ried to allocate {_SIZE}|you tried to allocate (?P<bytes>\d+) bytes")
_FREE = re.compile(rf"of which {_SIZE} is free")
_ALLOCATED = re.compile(rf"Of the allocated memory {_SIZE} is allocated by PyTorch")
_DEVICE = re.compile(r"GPU (?P<index>\d+) has a total capacity")


# Events, and the reactions of callbacks


@dataclass(frozen=True, kw_only=True)
class OutOfMemoryEvent:
    """Batch that did not fit into memory.

    Attributes:
        phase: Phase of the step: "forward", "backward", "optimizer step" or "evaluation"; with manual optimisation also
            "training step", between or after those.
        device: The device without memory, as torch names it.
        batch_idx: Number of the batch.
        batch_size: Its number of samples; None if unknown.
        parts: Number of micro-batches in which it was computed.
        most_parts: Maximum number of micro-batches: one sample each.
        obstacle: Reason why it cannot be split, or computed again at all; empty if it can.
        requested: Requested bytes; None if the error does not report them.
        free: Free bytes of the device, as reported by the error, else by the device after the failed attempt's tensors
            were released; None if neither reports them.
        message: The allocator's message.
        step: The trainer's `global_step`.
        seconds: Time of the error, by `time.monotonic()`.
        global_rank: Rank of the process. Default: 0.
        can_repeat: True if it can be computed again, or left out. If False, callbacks receive the event too, but the
            error is raised whatever they return. Default: True.

    Example:
        >>> event = OutOfMemoryEvent(
        ...     phase="forward", device="cuda:0", batch_idx=7, batch_size=32, parts=2, most_parts=32, obstacle="",
        ...     requested=None, free=None, message="CUDA out of memory.", step=7, seconds=0.0,
        ... )
        >>> print(event)
        Batch 7 of 32 samples, computed in 2 parts, ran out of memory on cuda:0 in forward.
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
    step: int
    seconds: float
    global_rank: int = 0
    can_repeat: bool = True

    def __str__(self) -> str:
        """Return the event in a sentence."""
        size = ""
        if self.batch_size is not None:
            ending = "" if self.batch_size == 1 else "s"
            size = f" of {self.batch_size} sample{ending}"
        parts = ""
        if self.parts > 1:
            parts = f", computed in {self.parts} parts,"
        rank = ""
        if self.global_rank:
            rank = f" of rank {self.global_rank}"
        return f"Batch {self.batch_idx}{size}{parts} ran out of memory on {self.device}{rank} in {self.phase}."


@dataclass(frozen=True)
class Split:
    """Reaction of a callback to an event: compute the batch in micro-batches.

    Attributes:
        parts: Number of micro-batches. 0: leave the batch out.
        grow_after: Number of successful batches of this kind after which micro-batches of twice the size are tried;
            0: never. Default: 100.

    Raises:
        ConfigurationError: If one of them is no whole number from 0.
    """

    parts: int
    grow_after: int = 100

    def __post_init__(self) -> None:
        for name, value in (("parts", self.parts), ("grow_after", self.grow_after)):
            check_whole(f"{name} of a Split", value, least=0)


# Errors and their messages


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means a lack of memory, on any device.

    An error of a process group never counts, whatever its text: its communicator has failed, so nothing can be computed
    again.

    Args:
        error: The error.

    Example:
        >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory.")), is_out_of_memory(ValueError())
        (True, False)
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # Messages of this package may contain the word.
    if isinstance(error, (StepError, CheckpointError, WorkerError)):
        return False
    if dist.is_available() and isinstance(error, dist.DistError):
        return False
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return any(sign in text for sign in _SIGNS)


def requested_bytes(message: str) -> int | None:
    """Return the requested bytes in an allocator's message, None without them."""
    match = _REQUESTED.search(message)
    if match is not None and match["bytes"]:
        return int(match["bytes"])
    return _bytes(match)


def free_bytes(message: str) -> int | None:
    """Return the free bytes in an allocator's message, None without them."""
    return _bytes(_FREE.search(message))


def allocated_bytes(message: str) -> int | None:
    """Return the bytes of live tensors on the device in an allocator's message, None without them."""
    return _bytes(_ALLOCATED.search(message))


def device_of(message: str) -> str | None:
    """Return the name of the device in an allocator's message, None without one."""
    match = _DEVICE.search(message)
    if match is None:
        return None
    return f"cuda:{match['index']}"


def _bytes(match: re.Match[str] | None) -> int | None:
    """Return the bytes of a match of `_SIZE`; None without one."""
    if match is None:
        return None
    return int(float(match["number"]) * _UNITS[match["unit"]])
