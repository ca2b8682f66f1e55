"""Manual optimisation: the user's step calls backward and steps the optimisers."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from equipoise.errors import StepError
from equipoise.interop.lightning.optimizers import NO_CLOSURE
from equipoise.interop.torch.optimizers import unscales_by_itself
from equipoise.memory.out_of_memory import Phase
from equipoise.parallel.batches.weighting import Weight
from equipoise.parallel.step_protocols import StepResult
from equipoise.trainer.optimization.backward import Backward
from equipoise.trainer.optimization.module_step import ModuleStep
from equipoise.trainer.optimization.optimizers import takes_no_closure
from equipoise.trainer.recovery.micro_batching import is_armed
from equipoise.trainer.recovery.recovery import refuse_by_hand

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext

__all__ = ["ManualOptimization"]


class ManualOptimization:
    """The user's training step runs backward and steps the optimisers."""

    def __init__(self, context: "RunContext") -> None:
        hooks = context.hooks
        self.trainer, self.strategy, self.scaler = context.trainer, context.strategy, context.precision.scaler
        self.step = _ManualStep(context)
        compute = self.strategy.forward_backward
        self.forward_backward = refuse_by_hand(context, compute) if is_armed(context) else compute
        self.backward = _ManualBackward(context, self.step)
        self.before_step = hooks.bind("on_before_optimizer_step")
        self.counts = context.trainer.progress.manual_step.current

    def __call__(self, parts: Sequence[Any], batch_idx: int, last: bool) -> StepResult:
        """Runs the training step on a batch."""
        self.step.batch_idx, self.step.indices, self.step.phase = batch_idx, (batch_idx,), "forward"
        return self.forward_backward(self.step, parts, last)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """What a LightningOptimizer calls."""

        def wrapped() -> Any:
            self.step.phase = "training step"
            answer = closure()
            self.step.phase = "optimizer step"
            if self.scaler is not None and not unscales_by_itself(optimizer):
                self.strategy.unscale_gradients(self.scaler, optimizer)
            if self.before_step is not None:
                self.before_step(optimizer)
            return answer

        self.counts.ready += 1
        self.step.phase = "optimizer step"
        if self.scaler is not None:
            wrapped()
            answer = self.strategy.scaled_step(self.scaler, optimizer, **kwargs)
            self.scaler.update()
        elif closure is NO_CLOSURE and takes_no_closure(optimizer):
            wrapped()
            answer = self.strategy.optimizer_step(optimizer, **kwargs)
        else:
            answer = self.strategy.optimizer_step(optimizer, wrapped, **kwargs)
        self.counts.completed = self.counts.ready
        self.step.phase = "training step"
        return answer

    def outputs(self, result: StepResult) -> dict[str, Any]:
        """What `on_train_batch_end` receives."""
        out = result.outputs
        outputs = dict(out) if isinstance(out, Mapping) else {} if out is None else {"loss": out}
        if "loss" in outputs:
            outputs["loss"] = outputs["loss"].detach()
        return outputs


class _ManualBackward:
    """Tells the step of backwards."""

    def __init__(self, context: "RunContext", step: "_ManualStep") -> None:
        self._run, self._step = Backward(context).manual, step

    def manual(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """`manual_backward`."""
        self._step.phase = "backward"
        self._run(loss, *args, **kwargs)
        self._step.phase = "training step"


class _ManualStep(ModuleStep):
    """Runs the training step, in which the user does everything.

    Attributes:
        phase: How far it came, as far as anybody sees.
    """

    phase: Phase = "forward"

    def __init__(self, context: "RunContext") -> None:
        super().__init__(context, "training_step")
        self.batch_idx, self.begins_window = 0, True

    def __call__(self, part: Any) -> StepResult:
        """Runs the training step on a part."""
        out = self.run(part)
        if out is not None and not isinstance(out, (Tensor, Mapping)):
            raise StepError(
                "In manual optimisation `training_step` returns a tensor, a dictionary or nothing, not"
                f" {type(out).__name__}."
            )
        return StepResult(None, None, out)

    def begin_micro_batch(self, size: int, batch_size: int) -> None:
        """Nothing is weighed."""

    def total_with(self, result: StepResult) -> Weight:
        """Nothing is weighed."""
        return 0

    def backward(self, result: StepResult) -> None:
        """Nothing: the user did it."""
