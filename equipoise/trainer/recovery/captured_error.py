"""A captured out-of-memory error, and the error with advice that is raised for it."""

import traceback
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from equipoise.memory.devices import format_bytes
from equipoise.memory.footprint import Footprint
from equipoise.memory.out_of_memory import OutOfMemoryEvent, allocated_bytes

__all__ = ["CapturedError", "raise_with_advice"]


@dataclass
class CapturedError:
    """What is kept of an error: no traceback, whose frames would keep the tensors of the failed attempt.

    Attributes:
        message: What the allocator said.
        lines: The traceback, as text.
        held: What the model held on the device then.
    """

    message: str
    lines: str
    held: Footprint = field(default_factory=Footprint)

    @classmethod
    def of(cls, error: BaseException) -> "CapturedError":
        """Takes from an error what is to be kept."""
        lines = "".join(traceback.format_exception(error))
        while error.__cause__ is not None:  # an error that was explained on its way
            error = error.__cause__
        return cls(str(error), lines)


def raise_with_advice(failure: CapturedError, event: OutOfMemoryEvent, advice: str = "") -> NoReturn:
    """Raises the error of an allocator: what was asked for, what was free, what holds the rest, and what would help.

    Args:
        failure: The error.
        event: What happened.
        advice: What would help. Default: what does in general.

    Raises:
        OutOfMemoryError: Torch's.
    """
    asked = f" It asked for {format_bytes(event.requested)}." if event.requested else ""
    free = f" There were {format_bytes(event.free)} free." if event.free is not None else ""
    raise torch.OutOfMemoryError(
        f"{event}{asked}{free} {_held(failure)} {advice or _advice(failure, event)}\n\n"
        f"The allocator said: {event.message}\n\n{failure.lines}"
    ) from None


def _held(failure: CapturedError) -> str:
    """What holds the memory: the model's own parts are counted, activations are what is left of what was allocated."""
    held, allocated = failure.held, allocated_bytes(failure.message)
    rest = ""
    if allocated is not None and allocated > held.total:
        rest = f", activations, the batch and the rest about {format_bytes(allocated - held.total)}"
    return (
        f"Held: parameters {format_bytes(held.parameters)}, gradients {format_bytes(held.gradients)}, optimiser state"
        f" {format_bytes(held.optimizer_state)}{rest}."
    )


def _advice(failure: CapturedError, event: OutOfMemoryEvent) -> str:
    """Options, the most effective first."""
    if event.phase == "optimizer step":
        return (
            f"{event.obstacle} Parameters, gradients and the optimiser's state do not fit. An optimiser with less state"
            " (SGD, or foreach=False), precision='bf16-true', or sharded states would help; smaller batches would not."
        ).lstrip()
    if event.obstacle:
        return event.obstacle
    if event.parts >= event.most_parts > 1 or event.batch_size == 1:
        return (
            "A single sample does not fit. Mixed precision (precision='bf16-mixed'), activation checkpointing, shorter"
            " or smaller samples, or a model over several devices would help."
        )
    allocated = allocated_bytes(failure.message)
    if allocated is not None and 2 * failure.held.total > allocated:  # smaller batches make room in the lesser half
        return (
            "What would help, the most effective first: an optimiser with less state (SGD), precision='bf16-true',"
            " OOMRecovery(policy='split'), a smaller batch_size with accumulate_grad_batches."
        )
    smaller = (
        "a smaller batch_size" if event.phase == "evaluation" else ("a smaller batch_size with accumulate_grad_batches")
    )
    last = "" if event.phase == "evaluation" else ", activation checkpointing"
    return (
        f"What would help, the most effective first: OOMRecovery(policy='split'), {smaller}, precision='bf16-mixed'"
        f"{last}."
    )
