"""The user's step as strategies see it, and its result."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from equipoise.parallel.batches.weighting import AccumulationWindow, Weight

__all__ = ["NO_RESULT", "Around", "EvaluationStep", "PartialOutputs", "PartwiseStep", "StepResult", "TrainingStep"]

T = TypeVar("T")
# Runs the forward of a step on a batch. It receives a function that computes the forward, and the batch, and returns
# what the function returned.
Around = Callable[[Callable[[], Any], Any], Any]
# Returns the metric of the module for a copy of it.
Original = Callable[[Any], Any]


class StepResult(NamedTuple):
    """Result of a training step.

    Attributes:
        loss: The mean loss, a scalar with its graph before the backward. None: the step was skipped.
        weight: The denominator of that mean. None: it is not needed.
        outputs: The return value of the module's `training_step`.
        logged: The values that it logged, if it ran on one part of a batch. Default: none.
    """

    loss: Tensor | None
    weight: Weight | None
    outputs: Any
    logged: Sequence[Any] = ()


# That of a process without a batch, and of a step that was left out.
NO_RESULT = StepResult(None, 0, None)


@dataclass
class PartialOutputs:
    """Outputs of the parts of a batch. They are gathered only when they are read: that costs memory of one device.

    Attributes:
        outputs, sizes, device, dim, weights: See `gather`.
    """

    outputs: Sequence[Any]
    sizes: Sequence[int]
    device: torch.device
    dim: int
    weights: Sequence[Weight]

    def check(self) -> None:
        """Check that the parts returned the same kind of value, also if they are never gathered. None is ignored.

        Raises:
            StepError: If they did not.
        """
        from equipoise.parallel.batches.gathering import check_kinds

        check_kinds(self.outputs)

    def gathered(self) -> Any:
        """Return the outputs, put together. Parts that returned None and have no weight are left out."""
        from equipoise.parallel.batches.gathering import gather

        outputs = []
        sizes = []
        weights = []
        parts = zip(self.outputs, self.sizes, self.weights, strict=True)
        for output, size, weight in parts:
            # A weight that is a tensor is not read: that would synchronise its device.
            has_weight = isinstance(weight, Tensor) or bool(weight)
            if output is None and not has_weight:
                continue
            outputs.append(output)
            sizes.append(size)
            weights.append(weight)
        if not outputs:
            return None
        return gather(outputs, sizes, self.device, dim=self.dim, weights=weights)


class PartwiseStep(Protocol):
    """A step of the user's module, for strategies that compute batches in parts."""

    def run_on(self, replica: nn.Module, part: Any, size: int) -> StepResult:
        """Run the step of a copy of the module on a part of a batch. Logged values stay with the result.

        Args:
            replica: The copy, or the module itself.
            part: The part, on the device of the copy.
            size: The part's number of samples.
        """

    def hook_scope(self) -> AbstractContextManager[None]:
        """Return a context manager to enter while nested calls of `run_on` run, in any thread."""

    def capture_logs(self, function: Callable[[], T]) -> tuple[T, Sequence[Any]]:
        """Run a function on one part of a batch. Return its result, and the values that it logged."""

    def log_together(
        self,
        parts: Sequence[Sequence[Any]],
        weights: Sequence[Weight],
        device: torch.device,
        *,
        original: Original,
    ) -> None:
        """Log once the values that the parts of a batch logged.

        Args:
            parts: The values that each part logged, in the order of the data.
            weights: The weight of each part in a mean.
            device: The device of the means.
            original: Function that returns the module's metric for a copy of it.
        """

    def merge(
        self,
        results: Sequence[StepResult],
        sizes: Sequence[int],
        device: torch.device,
        *,
        dim: int = 0,
        original: Original,
    ) -> StepResult:
        """Put the results of parts together on a device, and log the values that they logged.

        Args:
            results: The result of each part, in the order of the data.
            sizes: The number of samples of each part.
            device: The device of the result.
            dim: The dimension of the samples. Default: the first.
            original: Function that returns the module's metric for a copy of it.
        """


class TrainingStep(PartwiseStep, Protocol):
    """The user's training step, for strategies.

    Attributes:
        batch_idx: The number of the batch.
        begins_window: True if the accumulation window begins with the next backward.
        in_micro_batches: True while a batch is computed in micro-batches after an out-of-memory error.
    """

    batch_idx: int
    begins_window: bool
    in_micro_batches: bool

    @property
    def window(self) -> AccumulationWindow | None:
        """The accumulation window; None in manual optimisation."""

    def __call__(self, part: Any) -> StepResult:
        """Run `training_step` on a whole batch."""

    def run_inside(self, around: Around) -> None:
        """Run every later `training_step` on a whole batch inside a function of the strategy.

        Args:
            around: Function that is called as `around(compute, batch)` and returns what `compute()` returned. It
                replaces the function of an earlier call.
        """

    def backward(self, result: StepResult) -> None:
        """Run the backward of a result with its hooks and the scaler. Does nothing in manual optimisation.

        Raises:
            StepError: If the batch had its backward already, and `begin_micro_batch` did not announce another part.
        """

    def follow_later(self) -> AbstractContextManager[Callable[[], None]]:
        """Return a context for the backwards of micro-batches, which `on_after_backward` follows once.

        The context yields a function that calls the hook; it does nothing if there was no backward.
        """

    def begin_micro_batch(self, size: int, batch_size: int) -> None:
        """Announce a micro-batch, before its step and its backward.

        Args:
            size: Number of samples of the micro-batch.
            batch_size: Number of samples of its batch.
        """

    def weight_of(self, part: Any) -> int:
        """Return the number of samples of a whole batch, 1 where it is unknown."""

    def total_with(self, result: StepResult) -> Weight:
        """Return Σw of this process's window and of a result before its backward; 0 in manual optimisation."""


class EvaluationStep(PartwiseStep, Protocol):
    """The user's step without gradients, for strategies.

    Attributes:
        in_micro_batches: True while a batch is computed in micro-batches after an out-of-memory error.
    """

    in_micro_batches: bool

    def __call__(self, part: Any) -> Any:
        """Run the step on a whole batch and return its output."""

    def batch_size(self) -> int:
        """Return the number of samples of the present batch."""
