"""The training step of automatic optimisation: the forward, and the backward with the zeroing of gradients."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from torch import Tensor

from equipoise.errors import StepError
from equipoise.parallel.batches.weighting import Weight
from equipoise.parallel.step_protocols import NO_RESULT, StepResult
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.logging.logs import Logs
from equipoise.trainer.optimization.steps.backward import Backward
from equipoise.trainer.optimization.steps.batch_weight import BatchWeight, check_weight
from equipoise.trainer.optimization.steps.module_step import EXPLAINED, ModuleStep, explain_error
from equipoise.trainer.optimization.steps.step_extension import Context
from equipoise.trainer.optimization.steps.window_gradients import WindowGradients

if TYPE_CHECKING:
    from equipoise.memory.out_of_memory import Phase

__all__ = ["AutomaticStep"]

# Returns the weight of a batch or micro-batch. It receives the number of the batch, too.
WeightOf = Callable[[Any, int], int]

# Creates a named tuple without the Python code of its constructor, which handles defaults.
_new_tuple = tuple.__new__


class AutomaticStep(ModuleStep):
    """Run the training step and, as `backward`, everything from the zeroing of gradients to `on_after_backward`.

    After an out-of-memory error it can be computed again, in micro-batches.

    Args:
        module: The user's module.
        hooks: The hooks.
        logs: The logged values.
        forward_context: The context in which the training step runs; None if it needs none.
        backward: The backward.
        gradients: The gradients of the accumulation window.
        batch_weight: Finds the weight of a batch.
        skip_backward: Whether to run the forward only.

    Attributes:
        batch_idx: The number of the batch.
        begins_window: True if the gradients of an earlier window are still there.
        window: The accumulation window.
        run_backward: The backward.
        returned_none: True once `training_step` has returned None.
    """

    def __init__(
        self,
        module: LightningModule,
        hooks: Hooks,
        logs: Logs,
        forward_context: Context | None,
        backward: Backward,
        gradients: WindowGradients,
        batch_weight: BatchWeight,
        *,
        skip_backward: bool,
    ) -> None:
        super().__init__(module, hooks, logs, "training_step", forward_context)
        self.batch_idx = 0
        self.begins_window = True
        self.returned_none = False
        self.window = gradients.window
        self.run_backward = backward
        self._zero_grad = gradients.begin
        self._skip_backward = skip_backward
        self._batch_weight = batch_weight
        self._is_shared = gradients.is_shared
        # One process that computes a window together needs no weights.
        is_weighed = self.window.parts > 1 or self._is_shared
        self._usual_weight_of: WeightOf | None = batch_weight if is_weighed else None
        self._weight_of: WeightOf | None = self._usual_weight_of
        # True if the present batch, or micro-batch, had its backward.
        self._had_backward = False

    def begin_batch(self, *indices: int) -> None:
        """Begin a batch of the training loader, with the number of the batch."""
        self.indices = indices
        batch_idx = indices[0]
        self.batch_idx = batch_idx
        self.begins_window = batch_idx % self.window.parts == 0
        self._had_backward = False

    @property
    def phase(self) -> "Phase":
        """The phase of the present part: "forward" or "backward"."""
        return "backward" if self._had_backward else "forward"

    # Another attempt after an out-of-memory error.

    def repeat_batch(self, batch_idx: int) -> None:
        """Begin a batch again after a failed attempt. Gradients that the attempt has zeroed are not zeroed again."""
        self.indices = (batch_idx,)
        self.batch_idx = batch_idx
        self._had_backward = False

    def release_memory(self) -> None:
        """Release what the step holds between two batches to be faster. A step as it is holds nothing."""

    def begin_micro_batches(self) -> None:
        """Begin a batch that does not fit into memory. Its micro-batches, and the rest of the window, are weighed."""
        super().begin_micro_batches()
        self._weight_of = self._batch_weight.of_micro_batch

    def end_micro_batches(self) -> None:
        """End the batch; the next part is a batch again."""
        super().end_micro_batches()
        self.window.micro_batch = None

    def end_window(self) -> None:
        """Return to the usual weights after the optimiser's step."""
        self._weight_of = self._usual_weight_of
        if self._weight_of is None:
            self.window.forget_reference()

    # The computation.

    def begin_micro_batch(self, size: int, batch_size: int) -> None:
        """Note that the next part is a micro-batch, which has a weight; see `AccumulationWindow.micro_batch`."""
        self.window.micro_batch = (size, batch_size)
        self._had_backward = False
        if self._weight_of is None:
            self._usual_weight_of = self._batch_weight.of_micro_batch
            self._weight_of = self._usual_weight_of

    def __call__(self, part: Any) -> StepResult:
        """Run the training step on a batch, and find the loss and its weight in what it returned."""
        # 1. The forward. The plain way saves a call of `run`.
        if self.is_plain:
            try:
                output = self.method(part, self.batch_idx)
            except EXPLAINED as error:
                explain_error(error, self.module, part)
                raise
        else:
            output = self.run(part)

        # 2. The loss, and the user's weight.
        loss = output
        weight = None
        if not isinstance(output, Tensor):
            if output is None:
                self.returned_none = True
                return NO_RESULT
            loss, weight = _loss_and_weight(output)

        # 3. The weight, if the window needs one.
        if self._weight_of is not None:
            weight = self._weight_of(part, self.batch_idx) if weight is None else check_weight(weight)
        return _new_tuple(StepResult, (loss, weight, output, ()))

    def result(self, output: Any, size: int, logged: Sequence[Any]) -> StepResult:
        """Return the result of a part. It weighs as many samples as it has, unless the user returned a weight."""
        if output is None:
            self.returned_none = True
            return StepResult(None, 0, None, logged)
        if isinstance(output, Tensor):
            return StepResult(output, size, output, logged)
        loss, weight = _loss_and_weight(output)
        if weight is None:
            return StepResult(loss, size, output, logged)
        return StepResult(loss, check_weight(weight), output, logged)

    def weight_of(self, part: Any) -> int:
        """Return the number of samples of a batch."""
        return self._batch_weight(part, self.batch_idx)

    def total_with(self, result: StepResult) -> Weight:
        """Return Σw of the window, this result included."""
        return self.window.total_with(0 if result.weight is None else result.weight)

    def backward(self, result: StepResult) -> None:
        """Zero the gradients at the beginning of a window, then run the backward with the part's factor."""
        if self._skip_backward:
            return
        if self._had_backward:
            raise _second_backward(self.batch_idx)
        self._had_backward = True
        # 1. Gradients of the last window are kept until now, for hooks and for the user.
        if self.begins_window:
            self.begins_window = False
            self._zero_grad(self.batch_idx)

        # 2. The backward. A batch without weight has no gradient, and a skipped one has no loss.
        loss = result.loss
        weight = result.weight
        if loss is None:
            self._add_nothing()
        elif self._weight_of is None or weight is None:
            self.run_backward(loss)
        elif isinstance(weight, Tensor) or weight:
            factor = self.window.add(weight)
            self.run_backward(loss, factor, self.window.parts)
        else:
            self._add_nothing()

    def follow_later(self) -> AbstractContextManager[Callable[[], None]]:
        """Return a context without `on_after_backward`; see `TrainingStep`."""
        return self.run_backward.follow_later()

    def _add_nothing(self) -> None:
        """Add a part without weight: the first part fixes the reference weight, in all processes."""
        if self._is_shared:
            self.window.add(0)


def _second_backward(batch_idx: int) -> StepError:
    return StepError(
        f"The strategy calls `step.backward` a second time for the batch {batch_idx}, which would count twice in its"
        " accumulation window. Call `step.begin_micro_batch` before each of several parts of a batch. A gradient that"
        " is not added to the window comes from `torch.autograd.grad`."
    )


def _loss_and_weight(output: Any) -> tuple[Tensor, Weight | None]:
    """Return the loss and its weight from what `training_step` returned, unless that is a tensor."""
    if not isinstance(output, Mapping):
        raise StepError(
            "`training_step` must return a tensor, a dictionary with the key 'loss', or None to skip the batch, not"
            f" {type(output).__name__}."
        )
    loss = output.get("loss")
    if loss is None:
        raise StepError(
            f"`training_step` returned a dictionary without 'loss'; its keys are {list(output)}. Return the loss under"
            " that key, or None to skip the batch."
        )
    if not isinstance(loss, Tensor):
        raise StepError(
            f"`training_step` must return the loss as a tensor with its graph, but under 'loss' is {loss!r} of type"
            f" {type(loss).__name__}."
        )
    return loss, output.get("loss_weight")
