"""A captured out-of-memory error, and the error with advice that is raised for it."""

import traceback
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from equipoise.formats import format_bytes
from equipoise.memory.footprint import Footprint
from equipoise.memory.out_of_memory import OutOfMemoryEvent, allocated_bytes

__all__ = ["CapturedError", "raise_with_advice"]


@dataclass
class CapturedError:
    """The text of an error. A traceback is not kept: its frames would keep the tensors of the failed attempt.

    Attributes:
        message: The message of the allocator.
        lines: The traceback, as text.
        footprint: The memory of the model on the device at that time.
    """

    message: str
    lines: str
    footprint: Footprint = field(default_factory=Footprint)

    @classmethod
    def of(cls, error: BaseException) -> "CapturedError":
        """Return the text of an error."""
        lines = "".join(traceback.format_exception(error))
        # An error that was explained on its way has the allocator's error as its first cause.
        while error.__cause__ is not None:
            error = error.__cause__
        return cls(str(error), lines)


def raise_with_advice(captured: CapturedError, event: OutOfMemoryEvent, advice: str = "") -> NoReturn:
    """Raise an allocator's error with what it requested, what was free, what uses the rest, and what would help.

    Args:
        captured: The error.
        event: The event that callbacks received.
        advice: Advice on what would help. Default: general advice.

    Raises:
        OutOfMemoryError: Torch's.
    """
    requested = ""
    if event.requested:
        requested = f" It asked for {format_bytes(event.requested)}."
    free = ""
    if event.free is not None:
        free = f" There were {format_bytes(event.free)} free."
    if not advice:
        advice = _advice(captured, event)
    raise torch.OutOfMemoryError(
        f"{event}{requested}{free} {_usage(captured)} {advice}\n\n"
        f"The allocator said: {event.message}\n\n{captured.lines}"
    ) from None


def _usage(captured: CapturedError) -> str:
    """Return a sentence about the use of memory. Activations are the rest of what was allocated."""
    footprint = captured.footprint
    allocated = allocated_bytes(captured.message)
    rest = ""
    if allocated is not None and allocated > footprint.total:
        rest = f", activations, the batch and the rest about {format_bytes(allocated - footprint.total)}"
    return (
        f"Held: parameters {format_bytes(footprint.parameters)}, gradients {format_bytes(footprint.gradients)},"
        f" optimiser state {format_bytes(footprint.optimizer_state)}{rest}."
    )


def _advice(captured: CapturedError, event: OutOfMemoryEvent) -> str:
    # 1. Cases in which a smaller batch does not help.
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

    # 2. The model uses more than half of the memory: smaller batches make room in the other half only.
    allocated = allocated_bytes(captured.message)
    if allocated is not None and 2 * captured.footprint.total > allocated:
        return (
            "What would help, the most effective first: an optimiser with less state (SGD), precision='bf16-true',"
            " OOMRecovery(policy='split'), a smaller batch_size with accumulate_grad_batches."
        )

    # 3. Activations use most of it. Evaluations neither accumulate nor keep activations.
    smaller_batch = "a smaller batch_size with accumulate_grad_batches"
    checkpointing = ", activation checkpointing"
    if event.phase == "evaluation":
        smaller_batch = "a smaller batch_size"
        checkpointing = ""
    return (
        f"What would help, the most effective first: OOMRecovery(policy='split'), {smaller_batch},"
        f" precision='bf16-mixed'{checkpointing}."
    )
