"""A training step of a network whose blocks compute parts of sequences, and which has whole ones everywhere else."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from equipoise.errors import StepError
from equipoise.extensions.fsdp.mesh.context.blocks.divided_blocks import DividedBlocks
from equipoise.extensions.fsdp.mesh.context.divided_step import DividedSequences, DividedStep
from equipoise.extensions.fsdp.mesh.context.row_mode import RowMode
from equipoise.extensions.fsdp.mesh.context.sequence_row import SequenceRow
from equipoise.parallel.step_protocols import StepResult, TrainingStep

__all__ = ["BlockwiseSequences"]


class BlockwiseSequences(DividedSequences):
    """All that a process needs to compute parts of sequences in some blocks, for the time of a run.

    Args:
        module: The user's module.
        row: The processes that have parts of the same sequences.
        patterns: Names of the lists of blocks.
    """

    def __init__(self, module: nn.Module, row: SequenceRow, patterns: Sequence[str]) -> None:
        # A name that is none is an error before anything is changed.
        self._blocks = DividedBlocks(module, patterns, row)
        super().__init__(module, row)

    def close(self) -> None:
        """Restore the module."""
        super().close()
        self._blocks.close()

    def step_on(self, step: TrainingStep) -> DividedStep:
        """Return the step with blocks that compute parts."""
        return _BlockwiseStep(step, self)

    @contextmanager
    def mode(self) -> Iterator[RowMode]:
        """Let blocks compute parts of sequences in a `with` block of this thread."""
        # All that is no block computes as without it.
        self._blocks.begin()
        try:
            with RowMode(self.row, draws=self._draws) as mode:
                yield mode
            self._blocks.check_gathered()
        except Exception as error:
            self._blocks.check_gathered(error)
            raise
        finally:
            self._blocks.end()

    def backward_mode(self) -> AbstractContextManager[Any]:
        """Return the context of a backward, in which nothing is computed again."""
        return _NothingAgain(self.row)


class _NothingAgain(RowMode):
    """Refuses attention, dropout and losses in a backward, which would not know whether they see parts."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self.answers and func is not Tensor.backward:
            raise StepError(
                "FSDPStrategy(context_blocks=...) goes together with no activation checkpointing: what is computed"
                " again in the backward is not divided. Leave one of both out."
            )
        return super().__torch_function__(func, types, args, kwargs)


class _BlockwiseStep(DividedStep):
    """A training step whose batch, loss and logged values are whole in each process of a row."""

    def __call__(self, part: Any) -> StepResult:
        """Run the step on a batch."""
        with self._sequences.mode():
            return self._step(part)

    def of_row(self, result: StepResult) -> StepResult:
        """Return a result whose gradients add up over the row to those of the batch; see `DividedStep.of_row`."""
        if result.loss is None:
            return result
        combined: StepResult = self._combine(result, result.loss)
        return combined

    def _combine(self, result: StepResult, loss: Tensor) -> Any:
        """Return a result with the loss of the batch, and the gradient of a share of it."""
        # All processes have the same loss.
        share = loss / self._row.size
        return result._replace(loss=share + (loss.detach() - share.detach()))
