"""Manual optimisation: the user's step calls backward and steps the optimisers."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer

from equipoise.interop.lightning.optimizers import no_closure
from equipoise.interop.torch.optimizers import unscales_by_itself
from equipoise.parallel.step_protocols import StepResult
from equipoise.parallel.strategy_optimizer import StrategyOptimizer, StrategyOptimizers
from equipoise.precision import Precision
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.logging.logs import Logs
from equipoise.trainer.optimization.configuration.optimizers import takes_no_closure
from equipoise.trainer.optimization.manual_scaling import ManualScaling
from equipoise.trainer.optimization.manual_step import ManualBackward, ManualStep
from equipoise.trainer.optimization.steps.backward import Backward
from equipoise.trainer.optimization.steps.batch_weight import BatchWeight
from equipoise.trainer.optimization.steps.module_step import training_forward_context
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
        self._scaling: ManualScaling | None = None
        if precision.scaler is not None:
            self._scaling = ManualScaling(module, precision.scaler)
        self._counts = state.progress.manual_step.current
        self._before_step = hooks.bind("on_before_optimizer_step")
        self._optimizers = StrategyOptimizers(strategy.setup_optimizer)
        forward_context = training_forward_context(state, module, strategy, precision)
        self.step = ManualStep(module, hooks, logs, forward_context, batch_weight)
        gradients = None if self._scaling is None else self._scaling.gradients
        self.backward = ManualBackward(Backward(strategy, hooks, precision), self.step, gradients)
        self._forward_backward = _forward_backward_of(state, module, strategy, hooks)

    def __call__(self, parts: Sequence[Any], batch_idx: int, last: bool) -> StepResult:
        """Run the training step on a batch."""
        self.step.begin_batch(batch_idx)
        if self._scaling is not None:
            self._scaling.steps.begin()
        return self._forward_backward(self.step, parts, last)

    @property
    def has_skipped(self) -> bool:
        """True if the scaler has skipped all steps of the batch, of which there was at least one."""
        return self._scaling is not None and self._scaling.steps.are_skipped

    def end_window(self, batch_idx: int) -> None:
        """Do nothing: the user steps the optimisers."""

    def close(self) -> None:
        """Remove the hooks on optimisers and parameters, at the end of the epoch or after a failure."""
        if self._scaling is not None:
            self._scaling.close()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Step an optimiser, with the hooks and the scaler; a LightningOptimizer calls this."""
        strategy_optimizer = self._optimizers.of(optimizer)
        compute = partial(self._compute, strategy_optimizer, closure)

        # 1. The step, with everything that the user's closure computes. After an error the phase stays, for the report.
        self._counts.make_ready()
        self.step.phase = "optimizer step"
        if self._scaling is not None:
            result = self._scaling.step(strategy_optimizer, compute, **kwargs)
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
        if self._scaling is not None and not unscales_by_itself(optimizer):
            self._scaling.unscale(strategy_optimizer)
        if self._before_step is not None:
            self._before_step(optimizer)
        return loss

    def unscale(self, optimizer: Any) -> None:
        """Divide the gradients of an optimiser by the scale of the loss, once before its step."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if self._scaling is not None:
            self._scaling.unscale(self._optimizers.of(optimizer))

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


def _forward_backward_of(
    state: RunState, module: LightningModule, strategy: Strategy, hooks: Hooks
) -> Callable[..., StepResult]:
    """Return the strategy's `forward_backward`, with what callbacks put around it."""
    forward_backward = strategy.forward_backward
    if hooks.recovers:
        # Most runs have no callback that recovers.
        from equipoise.trainer.recovery.micro_batching import refuse_to_repeat

        forward_backward = refuse_to_repeat(state, module, strategy, hooks, forward_backward)
    return hooks.wrapped(forward_backward, hooks.action_of_strategy("forward_backward"))
