"""Training steps of a network whose blocks compute parts of sequences, and which has whole ones everywhere else."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from equipoise.errors import StepError
from equipoise.extensions.fsdp.mesh.context.blocks.divided_blocks import DividedBlocks
from equipoise.extensions.fsdp.mesh.context.models import DividedModels
from equipoise.extensions.fsdp.mesh.context.row_mode import RowMode
from equipoise.extensions.fsdp.mesh.context.sequence_row import SequenceRow
from equipoise.extensions.fsdp.mesh.context.steps.sequence_steps import SequenceSteps
from equipoise.parallel.step_protocols import StepResult, TrainingStep

__all__ = ["BlockwiseSequences"]


class BlockwiseSequences(SequenceSteps):
    """Divides sequences within some blocks, for the time of a run. Loss and logged values are whole in each process.

    Args:
        module: The user's module.
        row: The processes that have parts of the same sequences.
        patterns: Names of the lists of blocks.
    """

    def __init__(self, module: nn.Module, row: SequenceRow, patterns: Sequence[str]) -> None:
        self._row = row
        # A name that is none is an error before anything is changed.
        self._blocks = DividedBlocks(module, patterns, row)
        self._models = DividedModels(module, row)

    def close(self) -> None:
        """Restore the module."""
        self._models.close()
        self._blocks.close()

    def compute(self, step: TrainingStep, batch: Any, *, draws: bool = True) -> StepResult:
        """Run the user's step on a batch, of which blocks compute parts."""
        with self._mode(draws):
            return step(batch)

    @contextmanager
    def _mode(self, draws: bool) -> Iterator[None]:
        """Let blocks compute parts of sequences in a `with` block of this thread."""
        # All that is no block computes as without it.
        self._blocks.begin()
        try:
            with RowMode(self._row, draws=draws):
                yield
            self._blocks.check_gathered()
        except Exception as error:
            self._blocks.check_gathered(error)
            raise
        finally:
            self._blocks.end()

    def _of_batch(self, result: StepResult) -> StepResult:
        loss = result.loss
        assert loss is not None
        # All processes have the same loss, and each has the gradient of a share of it.
        share = loss / self._row.size
        return result._replace(loss=share + (loss.detach() - share.detach()))

    def backward_mode(self, *, draws: bool = True) -> AbstractContextManager[Any]:
        """Return the context of a backward, in which nothing is computed again."""
        return _NothingAgain(self._row)


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
