"""A training step on the part of a batch that a process has, with the loss and the logged values of the whole."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from equipoise.errors import StepError
from equipoise.extensions.fsdp.mesh.context.divided_batch import divide
from equipoise.extensions.fsdp.mesh.context.models import DividedModels
from equipoise.extensions.fsdp.mesh.context.row_mode import LEAST, RowMode
from equipoise.extensions.fsdp.mesh.context.sequence_row import SequenceRow
from equipoise.interop.lightning.self_log import LogOptions
from equipoise.interop.torch.autograd import run_backward_in_modes
from equipoise.parallel.step_protocols import StepResult, TrainingStep
from equipoise.trainer.logging.entry import combined, reduction_name

__all__ = ["DividedSequences", "DividedStep"]


class DividedSequences:
    """All that a process needs to compute parts of sequences, for the time of a run.

    Args:
        module: The user's module.
        row: The processes that have parts of the same sequences.

    Attributes:
        module: The module.
        row: The processes.
    """

    def __init__(self, module: nn.Module, row: SequenceRow) -> None:
        self.module = module
        self.row = row
        self._draws = True
        self._models = DividedModels(module, row)
        self._metrics = [part for part in module.modules() if isinstance(part, Metric)]

    def close(self) -> None:
        """Restore the module."""
        self._models.close()

    def step_on(self, step: TrainingStep) -> "DividedStep":
        """Return a step that divides the sequences of each batch.

        Args:
            step: The user's step.
        """
        return DividedStep(step, self)

    @contextmanager
    def without_draws(self) -> Iterator[None]:
        """Let no number be drawn for dropout in a `with` block."""
        self._draws = False
        try:
            yield
        finally:
            self._draws = True

    def num_updates(self) -> int:
        """Return how often the metrics of the module have been updated."""
        return sum(metric.update_count for metric in self._metrics)

    @contextmanager
    def mode(self) -> Iterator[RowMode]:
        """Let the module compute parts of sequences in a `with` block of this thread."""
        with self.row.divided(), self._models.attention, RowMode(self.row, draws=self._draws) as mode:
            yield mode

    def backward_mode(self) -> AbstractContextManager[Any]:
        """Return the context of a backward, in which forwards may be computed again."""
        return self.mode()


class DividedStep:
    """A training step that divides the sequences of a batch. It has the methods of a `TrainingStep`.

    Args:
        step: The user's step.
        sequences: Divides the sequences.
    """

    def __init__(self, step: TrainingStep, sequences: DividedSequences) -> None:
        self._step = step
        self._sequences = sequences
        self._row = sequences.row
        self._counts_labels = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def __call__(self, part: Any) -> StepResult:
        """Run the step on the part of a batch that this process has. Logged values stay with the result.

        Raises:
            StepError: If the batch cannot be divided, or a metric has seen a part of it.
        """
        divided = divide(part, self._row, self._sequences.module)
        num_updates = self._sequences.num_updates()
        with self._sequences.mode() as mode:
            result, logged = self._step.capture_logs(partial(self._step, divided))
        if self._sequences.num_updates() != num_updates:
            raise StepError(
                "`training_step` has updated a metric, which has seen a part of each sequence. Under"
                " FSDPStrategy(context=...) log numbers there, and update metrics in `validation_step`, where sequences"
                " are whole."
            )
        self._counts_labels = mode.counts_labels
        return result._replace(weight=_weight_of(result), logged=logged)

    def of_row(self, result: StepResult) -> StepResult:
        """Return a result with the loss and the weight of the whole batch, and the graph of the part.

        Gradients of the loss add up over the row to those of the whole batch. The weight is that of the row, which
        counts once, so that checkpoints of an open window are read by any mesh.

        What the parts have logged is logged as the values of the whole. All processes of the row call it together.

        Args:
            result: The result of this process.
        """
        device = torch.device("cpu")
        if result.loss is not None:
            device = result.loss.device
            result = self._combine(result, result.loss)
        self._step.log_together([result.logged], [1], device, original=_itself)
        return result

    def _combine(self, result: StepResult, loss: Tensor) -> Any:
        """Return a result with the values of the whole batch."""
        # 1. The share of this process in means, and the weight of all.
        row = self._row
        weight: Any = result.weight
        share = torch.full((), 1 / row.size, dtype=torch.float64, device=loss.device)
        if isinstance(weight, Tensor):
            total = row.add_up(weight)
            # The labels of all parts may count in each of them already.
            if not self._counts_labels:
                share = weight / total.clamp(min=LEAST)
            weight = total

        # 2. The values of all processes, in one exchange.
        numbers = [share, loss.detach().double()]
        for entry in result.logged:
            value = entry.value.to(share)
            size = torch.full_like(share, entry.batch_size or 0)
            numbers += [value.sum(), size]
        of_all = row.of_all(torch.stack(numbers))
        shares, losses, *columns = torch.stack(of_all, 1)

        # 3. Those of the row. The loss keeps its graph.
        logged = []
        pairs = zip(result.logged, columns[::2], columns[1::2], strict=True)
        for entry, values, sizes in pairs:
            logged.append(_combined(entry, values, shares, sizes))
        mean = _mean(losses, shares)
        loss = loss * share.to(loss.dtype)
        loss = loss + (mean - loss.detach()).to(loss.dtype)
        return result._replace(loss=loss, weight=weight, logged=logged)

    def backward(self, result: StepResult) -> None:
        """Run the backward of a result, with what is computed again in it; see `TrainingStep.backward`."""
        with self._sequences.backward_mode():
            self._step.backward(result)

    def backward_compared(self, result: StepResult) -> Tensor:
        """Add the gradients of a result, whose sum over the row is that of the whole batch, and return its loss.

        Args:
            result: The result of this process.
        """
        assert result.loss is not None
        result = self._combine(result, result.loss)
        assert result.loss is not None
        with self._sequences.backward_mode():
            run_backward_in_modes(result.loss)
        return result.loss


def _itself(metric: Any) -> Any:
    # The module computes parts by itself, not a copy of it.
    return metric


def _weight_of(result: StepResult) -> Any:
    """Return the weight of a part: a tensor if the user has returned it with the loss, else the number of samples."""
    if not isinstance(result.outputs, Mapping) or result.outputs.get("loss_weight") is None:
        return result.weight
    assert result.loss is not None
    # As a tensor, it may be 0 in one process: the others have gradients for its keys.
    return torch.as_tensor(result.weight).to(result.loss.device, torch.float64)


def _combined(logged: Any, values: Tensor, shares: Tensor, sizes: Tensor) -> Any:
    """Return a logged value of the whole batch, of those of all processes, their shares in a mean, and their sizes."""
    reduction = reduction_name(LogOptions(*logged.arguments).reduce_fx)
    if reduction == "mean":
        value = _mean(values, shares)
    else:
        value = combined(values.unbind(), reduction)
    if logged.value.is_floating_point():
        value = value.to(logged.value.dtype)
    if logged.batch_size is not None:
        logged = logged._replace(batch_size=int(sizes.sum()))
    return logged._replace(value=value)


def _mean(values: Tensor, shares: Tensor) -> Tensor:
    # A value without a share may be no number.
    return torch.where(shares > 0, values * shares, 0.0).sum() / shares.sum()
