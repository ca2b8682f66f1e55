"""Manual optimisation: the user's step calls backward and steps the optimisers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from equipoise.errors import StepError
from equipoise.interop.lightning.optimizers import no_closure
from equipoise.interop.torch.optimizers import unscales_by_itself
from equipoise.memory.out_of_memory import Phase
from equipoise.parallel.batches.weighting import Weight
from equipoise.parallel.step_protocols import StepResult
from equipoise.parallel.strategy_optimizer import StrategyOptimizer, StrategyOptimizers
from equipoise.precision import Precision
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.logging.logs import Logs
from equipoise.trainer.optimization.configuration.optimizers import takes_no_closure
from equipoise.trainer.optimization.steps.backward import Backward
from equipoise.trainer.optimization.steps.batch_weight import BatchWeight
from equipoise.trainer.optimization.steps.module_step import ModuleStep, training_forward_context
from equipoise.trainer.optimization.steps.scaled_gradients import ScaledGradients
from equipoise.trainer.optimization.steps.scaled_steps import ScaledSteps
from equipoise.trainer.optimization.steps.step_extension import Context
from equipoise.trainer.state.run_state import RunState

__all__ = ["ManualOptimization"]


class ManualOptimization:
    """The user's training step runs backward and steps the optimisers.

    Args:
        state: The settings and counters.
        module: The user's module.
        strategy: The strategy.
        hooks: The hooks.
        precision: The precision.
        logs: The logged values.
        batch_weight: Finds the number of samples of a batch.

    Attributes:
        step: The training step.
        backward: The backward, for Lightning's `manual_backward`.
    """

    def __init__(
        self,
        state: RunState,
        module: LightningModule,
        strategy: Strategy,
        hooks: Hooks,
        precision: Precision,
        logs: Logs,
        batch_weight: BatchWeight,
    ) -> None:
        self._scaler = precision.scaler
        self._scaled_steps: ScaledSteps | None = None
        self._scaled_gradients: ScaledGradients | None = None
        if self._scaler is not None:
            self._scaled_steps = ScaledSteps(self._scaler)
            self._scaled_gradients = ScaledGradients(module, self._scaler)
        self._counts = state.progress.manual_step.current
        # By identity: the optimisers whose gradients were unscaled before their step, and those that were stepped since
        # the scale was updated.
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()
        self._before_step = hooks.bind("on_before_optimizer_step")
        self._optimizers = StrategyOptimizers(strategy.setup_optimizer)
        forward_context = training_forward_context(state, module, strategy, precision)
        self.step = _ManualStep(module, hooks, logs, forward_context, batch_weight)
        backward = Backward(strategy, hooks, precision)
        self.backward = _ManualBackward(backward, self.step, self._scaled_gradients)
        self._forward_backward = strategy.forward_backward
        if hooks.recovers:
            from equipoise.trainer.recovery.micro_batching import refuse_to_repeat

            self._forward_backward = refuse_to_repeat(state, module, strategy, hooks, strategy.forward_backward)
        action = hooks.action_of_strategy("forward_backward")
        self._forward_backward = hooks.wrapped(self._forward_backward, action)

    def __call__(self, parts: Sequence[Any], batch_idx: int, last: bool) -> StepResult:
        """Run the training step on a batch."""
        self.step.begin_batch(batch_idx)
        if self._scaled_steps is not None:
            self._scaled_steps.begin()
        return self._forward_backward(self.step, parts, last)

    @property
    def has_skipped(self) -> bool:
        """True if the scaler has skipped all steps of the batch, of which there was at least one."""
        return self._scaled_steps is not None and self._scaled_steps.are_skipped

    def end_window(self, batch_idx: int) -> None:
        """Do nothing: the user steps the optimisers."""

    def close(self) -> None:
        """Remove the hooks on the optimisers, at the end of the epoch or after a failure."""
        if self._scaled_steps is not None:
            self._scaled_steps.close()
        if self._scaled_gradients is not None:
            self._scaled_gradients.close()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Step an optimiser, with the hooks and the scaler; a LightningOptimizer calls this."""
        strategy_optimizer = self._optimizers.of(optimizer)

        def compute() -> Any:
            return self._compute(strategy_optimizer, closure)

        # 1. The step, with everything that the user's closure computes.
        self._counts.make_ready()
        self.step.phase = "optimizer step"
        if self._scaled_steps is not None and self._scaled_gradients is not None:
            # A scaler takes no closure.
            result = self._take_scaled_step(strategy_optimizer, compute, self._scaled_steps, **kwargs)
            self._scaled_gradients.settle(optimizer)
        elif closure is no_closure and takes_no_closure(optimizer):
            # A closure costs more than a small step, so it is left out if neither the optimiser nor the user can tell.
            compute()
            result = strategy_optimizer.step(**kwargs)
        else:
            result = strategy_optimizer.step(compute, **kwargs)

        # 2. The training step continues.
        self._counts.complete_ready()
        self.step.phase = "training step"
        return result

    def _compute(self, strategy_optimizer: StrategyOptimizer, closure: Callable[[], Any]) -> Any:
        # 1. The closure. It computes a loss, and may run a backward.
        self.step.phase = "training step"
        loss = closure()

        # 2. The gradients. A fused optimiser unscales them in its step.
        self.step.phase = "optimizer step"
        optimizer = strategy_optimizer.optimizer
        if not unscales_by_itself(optimizer):
            self.unscale(optimizer)
        if self._before_step is not None:
            self._before_step(optimizer)
        return loss

    def _take_scaled_step(
        self,
        strategy_optimizer: StrategyOptimizer,
        compute: Callable[[], Any],
        scaled_steps: ScaledSteps,
        **kwargs: Any,
    ) -> Any:
        """Step an optimiser, and update the scale once no gradients of another are unscaled by the present one."""
        key = id(strategy_optimizer.optimizer)
        if key in self._stepped:
            self._update_scale(scaled_steps.scaler)
        compute()
        if not self._are_scaled(strategy_optimizer.optimizer):
            return scaled_steps.take_plain(strategy_optimizer, **kwargs)
        result = scaled_steps.take(strategy_optimizer, **kwargs)
        self._unscaled.discard(key)
        self._stepped.add(key)
        if not self._unscaled:
            self._update_scale(scaled_steps.scaler)
        return result

    def _update_scale(self, scaler: GradScaler) -> None:
        scaler.update()
        self._unscaled.clear()
        self._stepped.clear()

    def unscale(self, optimizer: Any) -> None:
        """Divide the gradients of an optimiser by the scale of the loss, once before its step."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if self._scaler is None or id(optimizer) in self._unscaled or not self._are_scaled(optimizer):
            return
        self._optimizers.of(optimizer).unscale(self._scaler)
        self._unscaled.add(id(optimizer))

    def _are_scaled(self, optimizer: Optimizer) -> bool:
        return self._scaled_gradients is not None and self._scaled_gradients.are_scaled(optimizer)

    def outputs(self, result: StepResult) -> dict[str, Any]:
        """Return what `on_train_batch_end` receives."""
        returned = result.outputs
        if returned is None:
            return {}
        if not isinstance(returned, Mapping):
            return {"loss": returned.detach()}
        outputs = dict(returned)
        if "loss" in outputs:
            outputs["loss"] = outputs["loss"].detach()
        return outputs


class _ManualStep(ModuleStep):
    """Run the training step, in which the user runs backward and steps the optimisers."""

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
        super().begin_batch(*indices)
        self.batch_idx = indices[0]
        self.phase = "forward"

    def __call__(self, part: Any) -> StepResult:
        output = self.run(part)
        if output is not None and not isinstance(output, (Tensor, Mapping)):
            raise StepError(
                "In manual optimisation `training_step` returns a tensor, a dictionary or nothing, not"
                f" {type(output).__name__}."
            )
        return StepResult(None, None, output)

    def follow_later(self) -> AbstractContextManager[Callable[[], None]]:
        return nullcontext(lambda: None)

    def begin_micro_batch(self, size: int, batch_size: int) -> None: ...

    def weight_of(self, part: Any) -> int:
        return self._batch_weight(part, self.batch_idx)

    def total_with(self, result: StepResult) -> Weight:
        return 0

    def backward(self, result: StepResult) -> None: ...


class _ManualBackward:
    """The user's backwards, of which the step notes the phase."""

    def __init__(self, backward: Backward, step: _ManualStep, gradients: ScaledGradients | None) -> None:
        self._run = backward.manual
        if gradients is not None:
            self._run = gradients.as_scaled(self._run)
        self._step = step

    def manual(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._step.phase = "backward"
        self._run(loss, *args, **kwargs)
        self._step.phase = "training step"
