"""Training steps as a process computes them on the sequences of a batch."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from equipoise.interop.torch.autograd import run_backward_in_modes
from equipoise.parallel.step_protocols import StepResult, TrainingStep

__all__ = ["SequenceSteps"]


class SequenceSteps:
    """The ways in which a process computes a training step. Default: on whole sequences, as on one device.

    A process may also compute a part of each sequence, together with the other processes of its row. Then its result
    has the loss of the part until `combine_over_row`.
    """

    def close(self) -> None:
        """Restore the module at the end of a run."""

    def compute(self, step: TrainingStep, batch: Any, *, draws: bool = True) -> StepResult:
        """Run the user's step on this process's part of a batch.

        Args:
            step: The user's step.
            batch: The whole batch.
            draws: Whether dropout on parts draws numbers. Default: True.

        Raises:
            StepError: If the batch cannot be divided, or a metric has seen a part of it.
        """
        return step(batch)

    def combine_over_row(self, step: TrainingStep, result: StepResult) -> StepResult:
        """Log the values of the whole batch, and return its result. All processes of the row call this together.

        Args:
            step: The user's step.
            result: The result of this process.
        """
        if result.loss is None:
            return result
        return self._of_batch(result)

    def _of_batch(self, result: StepResult) -> StepResult:
        """Return a result with the values of the whole batch. Gradients of its loss add up over the row to the batch's.

        The weight is that of the row, which counts once, so that checkpoints of an open window are read by any mesh.
        """
        return result

    def backward_mode(self, *, draws: bool = True) -> AbstractContextManager[Any]:
        """Return the context of a backward, in which forwards may be computed again.

        Args:
            draws: Whether dropout on parts draws numbers in them. Default: True.
        """
        return nullcontext()

    def backward(self, step: TrainingStep, result: StepResult) -> None:
        """Run the backward of a result; see `TrainingStep.backward`."""
        with self.backward_mode():
            step.backward(result)

    def backward_compared(self, result: StepResult) -> Tensor:
        """Add the gradients of a result to be compared with those of whole sequences, and return the batch's loss.

        Args:
            result: The result of this process, computed without draws.
        """
        loss = self._of_batch(result).loss
        assert loss is not None
        with self.backward_mode(draws=False):
            run_backward_in_modes(loss)
        return loss
