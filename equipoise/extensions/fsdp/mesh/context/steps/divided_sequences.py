"""Training steps on parts of sequences, of which each process of a row has one."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

from equipoise.errors import StepError
from equipoise.extensions.fsdp.mesh.context.divided_batch import divide
from equipoise.extensions.fsdp.mesh.context.models import DividedModels
from equipoise.extensions.fsdp.mesh.context.row_mode import RowMode
from equipoise.extensions.fsdp.mesh.context.sequence_row import SequenceRow
from equipoise.extensions.fsdp.mesh.context.steps.combined_parts import combine_parts, weight_of_part
from equipoise.extensions.fsdp.mesh.context.steps.sequence_steps import SequenceSteps
from equipoise.parallel.step_protocols import StepResult, TrainingStep

__all__ = ["DividedSequences"]


class DividedSequences(SequenceSteps):
    """Divides the sequences of each batch, for the time of a run.

    Args:
        module: The user's module.
        row: The processes that have parts of the same sequences.
    """

    def __init__(self, module: nn.Module, row: SequenceRow) -> None:
        self._module = module
        self._row = row
        self._models = DividedModels(module, row)
        self._metrics = [part for part in module.modules() if isinstance(part, Metric)]
        # Whether the loss of the last part counts the labels of all parts.
        self._counts_labels = False

    def close(self) -> None:
        """Restore the module."""
        self._models.close()

    @contextmanager
    def mode(self, *, draws: bool = True) -> Iterator[RowMode]:
        """Let the module compute parts of sequences in a `with` block of this thread.

        Args:
            draws: Whether dropout draws numbers. Default: True.
        """
        with self._row.divided(), self._models.attention, RowMode(self._row, draws=draws) as mode:
            yield mode

    def compute(self, step: TrainingStep, batch: Any, *, draws: bool = True) -> StepResult:
        """Run the user's step on the part that this process has. Logged values stay with the result."""
        part = divide(batch, self._row, self._module)
        num_updates = self._num_updates()
        with self.mode(draws=draws) as mode:
            result, logged = step.capture_logs(partial(step, part))
        if self._num_updates() != num_updates:
            raise StepError(
                "`training_step` has updated a metric, which has seen a part of each sequence. Under"
                " FSDPStrategy(context=...) log numbers there, and update metrics in `validation_step`, where sequences"
                " are whole."
            )
        self._counts_labels = mode.counts_labels
        return result._replace(weight=weight_of_part(result), logged=logged)

    def _num_updates(self) -> int:
        """Return how often the metrics of the module have been updated."""
        return sum(metric.update_count for metric in self._metrics)

    def combine_over_row(self, step: TrainingStep, result: StepResult) -> StepResult:
        """Log the values of the whole batch, and return its result; see `SequenceSteps.combine_over_row`."""
        result = super().combine_over_row(step, result)
        device = torch.device("cpu") if result.loss is None else result.loss.device
        # The module computes parts by itself, not a copy of it.
        step.log_together([result.logged], [1], device, original=lambda metric: metric)
        return result

    def _of_batch(self, result: StepResult) -> StepResult:
        return combine_parts(self._row, result, counts_labels=self._counts_labels)

    def backward_mode(self, *, draws: bool = True) -> AbstractContextManager[Any]:
        """Return the context of a backward, in which forwards on parts may be computed again."""
        return self.mode(draws=draws)
