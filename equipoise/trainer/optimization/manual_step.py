"""A training step by hand, and its backwards."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from equipoise.errors import StepError
from equipoise.memory.out_of_memory import Phase
from equipoise.parallel.batches.weighting import Weight
from equipoise.parallel.step_protocols import StepResult
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.logging.logs import Logs
from equipoise.trainer.optimization.steps.backward import Backward
from equipoise.trainer.optimization.steps.batch_weight import BatchWeight
from equipoise.trainer.optimization.steps.module_step import ModuleStep
from equipoise.trainer.optimization.steps.scaled_gradients import ScaledGradients
from equipoise.trainer.optimization.steps.step_extension import Context

__all__ = ["ManualBackward", "ManualStep"]


class ManualStep(ModuleStep):
    """Run the training step, in which the user runs backward and steps the optimisers.

    Attributes:
        batch_idx: The index of the batch.
        phase: What the user's step does now. It stays after an error, which is reported with it.
    """

    # The trainer accumulates nothing: each batch is a window of its own.
    begins_window = True
    # Steps by hand may return nothing.
    returned_none = False
    window = None

    def __init__(
        self,
        module: LightningModule,
        hooks: Hooks,
        logs: Logs,
        forward_context: Context | None,
        batch_weight: BatchWeight,
    ) -> None:
        super().__init__(module, hooks, logs, "training_step", forward_context)
        self._batch_weight = batch_weight
        self.batch_idx = 0
        self.phase: Phase = "forward"

    def begin_batch(self, *indices: int) -> None:
        """Begin a batch. Its index comes first."""
        super().begin_batch(*indices)
        self.batch_idx = indices[0]
        self.phase = "forward"

    def __call__(self, part: Any) -> StepResult:
        """Run the step. Its result has no loss, as the user has run the backwards."""
        output = self.run(part)
        if output is not None and not isinstance(output, (Tensor, Mapping)):
            raise StepError(
                "In manual optimisation `training_step` returns a tensor, a dictionary or nothing, not"
                f" {type(output).__name__}."
            )
        return StepResult(None, None, output)

    def weight_of(self, part: Any) -> int:
        """Return the number of samples."""
        return self._batch_weight(part, self.batch_idx)

    # A strategy calls these around a backward of its own. Here the user has run the backwards within the step.

    def follow_later(self) -> AbstractContextManager[Callable[[], None]]:
        """Return an empty context."""
        return nullcontext(lambda: None)

    def begin_micro_batch(self, size: int, batch_size: int) -> None:
        """Do nothing."""

    def total_with(self, result: StepResult) -> Weight:
        """Return 0."""
        return 0

    def backward(self, result: StepResult) -> None:
        """Do nothing."""


class ManualBackward:
    """The user's backwards, of which the step notes the phase.

    Args:
        backward: The backward.
        step: The step.
        gradients: Notes which gradients are scaled. None: there is no scaler.
    """

    def __init__(self, backward: Backward, step: ManualStep, gradients: ScaledGradients | None) -> None:
        self._run = backward.manual
        if gradients is not None:
            self._run = gradients.as_scaled(self._run)
        self._step = step

    def manual(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run a backward, with the arguments of `manual_backward`."""
        self._step.phase = "backward"
        self._run(loss, *args, **kwargs)
        self._step.phase = "training step"
