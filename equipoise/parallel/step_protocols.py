"""The user's step as strategies see it, and its result."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from equipoise.parallel.batches.weighting import Weight

__all__ = ["EvaluationStep", "PartwiseStep", "StepResult", "TrainingStep"]

T = TypeVar("T")
Original = Callable[[Any], Any]


class StepResult(NamedTuple):
    """What a training step came to.

    Attributes:
        loss: The mean loss, a scalar with its graph before the backward; None where the step was skipped.
        weight: The denominator of that mean; None where nobody needs it.
        outputs: What the module's `training_step` returned.
        logged: What it logged, if it ran on one part of a batch.
    """

    loss: Tensor | None
    weight: Weight | None
    outputs: Any
    logged: Sequence[Any] = ()


class PartwiseStep(Protocol):
    """A step of the user's module, as a strategy sees it that computes batches in parts."""

    def on(self, replica: nn.Module, part: Any, size: int) -> StepResult:
        """Runs the step of a copy of the module on a part of so many samples; what it logs stays with the result."""

    def inside(self) -> AbstractContextManager[None]:
        """To be entered while runs of `on` lie in one another, in whatever threads."""

    def apart(self, function: Callable[[], T]) -> tuple[T, Sequence[Any]]:
        """Runs a function on one part; returns its answer, and what it logged."""

    def log_together(
        self, parts: Sequence[Sequence[Any]], weights: Sequence[Weight], device: torch.device, *, original: Original
    ) -> None:
        """Logs once what the parts of a batch logged apart; see `combine`."""

    def combine(
        self,
        results: Sequence[StepResult],
        sizes: Sequence[int],
        device: torch.device,
        *,
        dim: int = 0,
        original: Original,
    ) -> StepResult:
        """Puts the results of parts together on a device, and logs what they logged.

        Args:
            results: In the order of the data.
            sizes: The numbers of samples.
            device: Where.
            dim: The dimension of the samples.
            original: The module's metric of which another is a copy.
        """


class TrainingStep(PartwiseStep, Protocol):
    """The user's training step, as a strategy sees it.

    Attributes:
        batch_idx: The number of the batch.
        first: Whether the accumulation window begins with the next backward.
    """

    def __call__(self, part: Any) -> StepResult:
        """Runs `training_step` on a whole batch."""

    batch_idx: int
    first: bool

    def backward(self, result: StepResult) -> None:
        """Runs the backward of a result with its hooks and the scaler; nothing in manual optimisation."""

    def piece_of(self, size: int, whole: int) -> None:
        """The next part to go backward is a piece of so many samples of a batch."""

    def total_with(self, result: StepResult) -> Weight:
        """Σw of this process's window, a result that is about to go backward included; 0 in manual optimisation."""


class EvaluationStep(PartwiseStep, Protocol):
    """The user's step without gradients, as a strategy sees it."""

    def __call__(self, part: Any) -> Any:
        """Runs the step on a whole batch and returns its output."""
