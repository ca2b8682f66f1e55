"""Out-of-memory errors of allocators: how they are recognised, and the sizes that they report."""

import re
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from equipoise.errors import CheckpointError, ConfigurationError, StepError, WorkerError

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

_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    # What cuDNN says where no algorithm's workspace fits.
    "unable to find an engine to execute this computation",
    "CUDNN_STATUS_NOT_SUPPORTED",
)
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)|you tried to allocate (\d+) bytes")
_FREE = re.compile(r"of which ([\d.]+) (bytes|KiB|MiB|GiB) is free")
_ALLOCATED = re.compile(r"Of the allocated memory ([\d.]+) (bytes|KiB|MiB|GiB) is allocated by PyTorch")
_DEVICE = re.compile(r"GPU (\d+) has a total capacity")


@dataclass(frozen=True, kw_only=True)
class OutOfMemoryEvent:
    """A batch that did not fit.

    Attributes:
        phase: What ran: "forward", "backward", "optimizer step" or "evaluation"; with manual optimisation also
            "training step", between or after those.
        device: The device that ran out, as torch names it.
        batch_idx: The number of the batch.
        batch_size: Its number of samples; None if nobody can tell.
        parts: In how many parts it was computed when memory ran out.
        most_parts: In how many it can be computed at most: one sample each.
        obstacle: Why it cannot be cut, or done again at all; empty if it can.
        requested: The bytes that were asked for; None if the error does not say.
        free: The bytes that were free on the device, as the error says, else the device once the failed attempt's
            tensors are gone; None if neither does.
        message: What the allocator said.
        step: The trainer's `global_step`.
        seconds: When, by `time.monotonic()`.
        global_rank: The process. Default: 0.
        can_repeat: Whether it can be done again, or left out. If not, callbacks are told all the same, but the error is
            raised whatever they answer. Default: True.

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
        """What happened, in a sentence."""
        size = "" if self.batch_size is None else f" of {self.batch_size} sample{'s' if self.batch_size != 1 else ''}"
        parts = f", computed in {self.parts} parts," if self.parts > 1 else ""
        rank = f" of rank {self.global_rank}" if self.global_rank else ""
        return f"Batch {self.batch_idx}{size}{parts} ran out of memory on {self.device}{rank} in {self.phase}."


@dataclass(frozen=True)
class Split:
    """An answer to an event: compute the batch in parts.

    Attributes:
        parts: In how many. 0: leave the batch out.
        grow_after: After how many good batches of its kind parts twice as large are tried; 0: never. Default: 100.

    Raises:
        ConfigurationError: If one of them is no whole number from 0.
    """

    parts: int
    grow_after: int = 100

    def __post_init__(self) -> None:
        for name, value in (("parts", self.parts), ("grow_after", self.grow_after)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigurationError(f"{name} of a Split is a whole number from 0, not {value!r}.")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on whatever device.

    An error of a process group never does, whatever its text: its communicator is dead, so nothing can be done again.

    Example:
        >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory.")), is_out_of_memory(ValueError())
        (True, False)
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, (StepError, CheckpointError, WorkerError)):  # of ours, which may speak of memory
        return False
    if dist.is_available() and isinstance(error, dist.DistError):
        return False
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def requested_bytes(message: str) -> int | None:
    """How much was asked for, as an allocator's message has it."""
    return _bytes(_ASKED.search(message))


def free_bytes(message: str) -> int | None:
    """How much was free, as an allocator's message has it."""
    return _bytes(_FREE.search(message))


def allocated_bytes(message: str) -> int | None:
    """How much live tensors held on the device, as an allocator's message has it."""
    return _bytes(_ALLOCATED.search(message))


def device_of(message: str) -> str | None:
    """Which device ran out, as an allocator's message has it."""
    found = _DEVICE.search(message)
    return f"cuda:{found[1]}" if found else None


def _bytes(found: re.Match[str] | None) -> int | None:
    if found is None:
        return None
    number, unit = (found[1], found[2]) if found[1] else (found[3], "bytes")
    return int(float(number) * _UNITS[unit])
