"""Automatic optimisation: accumulate gradients, clip them, step the optimiser.

    automatic                                                   manual
    forward_backward ─ training_step                            training_step, which calls
                     └ zero_grad (first of the window), backward    manual_backward, optimizer.step()
    last of the window:
      finish_gradients, unscale, on_before_optimizer_step, clip
      optimizer step

An unmodified optimiser of torch other than LBFGS is stepped after its gradients are there; handing it a closure costs
more than all the rest. Others, and a module that overrides `optimizer_step`, receive the closure, as in Lightning.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import LBFGS, Optimizer

from equipoise.errors import ConfigurationError, StepError
from equipoise.interop.lightning.optimizers import closure_not_called
from equipoise.interop.torch.optimizers import may_decide_by_loss, plain_step
from equipoise.parallel.step_protocols import NO_RESULT, PartialOutputs, StepResult
from equipoise.parallel.strategy_optimizer import StrategyOptimizer, StrategyOptimizers
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.optimization.configuration.optimizers import takes_no_closure
from equipoise.trainer.optimization.steps.automatic_step import AutomaticStep
from equipoise.trainer.optimization.steps.window_gradients import WindowGradients
from equipoise.trainer.state.run_state import RunState

if TYPE_CHECKING:
    from equipoise.trainer.optimization.steps.scaled_steps import ScaledSteps
    from equipoise.trainer.recovery.recovery import Recovery

__all__ = ["AutomaticOptimization"]


ForwardBackward = Callable[[Any, Sequence[Any], bool], StepResult]


class AutomaticOptimization:
    """The trainer zeroes gradients, runs the backward, clips and steps.

    It is bound for an epoch: callbacks may change the optimiser and the window between epochs. It is called with the
    parts of a batch, the number of the batch, and whether the accumulation window ends with it.

    Args:
        state: The optimisers and counters.
        strategy: The strategy.
        hooks: The hooks.
        gradients: The gradients of the accumulation window.
        step: The training step.
        recovery: Repeats the computation after an out-of-memory error; None if no callback decides about these errors.
        as_lightning: Returns an optimiser in the form in which `optimizer_step` receives it.

    Attributes:
        step: The training step.
        backward: The backward, for Lightning's `manual_backward`.
    """

    # The loss that the last closure returned. A step without a batch returns it again.
    _last_loss: Tensor | None = None
    # Whether the present step ends a window after its last batch.
    _ends_early = False
    # Its module is loaded in runs that need it.
    _scaled_steps: "ScaledSteps | None"

    def __init__(
        self,
        state: RunState,
        strategy: Strategy,
        hooks: Hooks,
        gradients: WindowGradients,
        step: AutomaticStep,
        recovery: "Recovery | None",
        as_lightning: Callable[[Optimizer], LightningOptimizer],
    ) -> None:
        self._state = state
        self._gradients = gradients
        self._in_backward = gradients.in_backward
        self.step = step
        self.backward = step.run_backward
        self._window = gradients.window
        self._scaler = gradients.scaler
        self._counts = state.progress.optimizer_step.current
        self._optimizer = gradients.optimizer
        self._are_several = _are_several(state.optimizers, step.module)
        _check_scaler(self._scaler, self._optimizer)
        self._scaled_steps = self._start_scaler(strategy.root_device)
        self._is_alone = strategy.processes.world_size == 1

        # 1. Recovery around the computation and the optimiser's step.
        self._recovery = recovery
        self._forward_backward: ForwardBackward = strategy.forward_backward
        self._optimizers = optimizers = gradients.optimizers
        if recovery is not None:
            self._forward_backward = recovery
            self._optimizers = StrategyOptimizers(lambda optimizer: recovery.protect(optimizers.of(optimizer)))
        self._forward_backward = hooks.wrapped(self._forward_backward, hooks.action_of_strategy("forward_backward"))

        # Gradients of several processes are those of the batch when they are weighed, and the hook sees them then.
        self._compute_last = self._forward_backward
        has_parts = not self._is_alone and not strategy.processes.has_one_state
        if has_parts and self.backward.is_seen:
            from equipoise.parallel.divergence.unfinished_gradients import UnfinishedGradients

            self.backward.watch(UnfinishedGradients(step.module).read_by)
            self._compute_last = self._compute_and_follow_later

        # 2. The order of computation and optimiser's step. A closure costs more than all else in a small step, so it is
        #    left out if neither the optimiser nor the user can tell. A scaler takes no closure, and several optimisers
        #    receive none.
        self._user_step = hooks.bind_module("optimizer_step")
        is_unnoticed = self._scaler is not None or self._are_several or takes_no_closure(self._optimizer)
        self._needs_no_closure = self._user_step is None and is_unnoticed
        # All processes decide by the loss of all samples.
        self._reduce: Callable[..., Any] | None = None
        if has_parts and may_decide_by_loss(self._optimizer):
            self._reduce = strategy.processes.reduce
        self._lightning_optimizer = None if self._needs_no_closure else as_lightning(self._optimizer)

        self._plain_step = self._bind_plain_step(optimizers)

        # Outputs of the parts of a batch are put together only if a hook reads them.
        self._gathers_outputs = hooks.reads_outputs("on_train_batch_end")

    def _bind_plain_step(self, optimizers: StrategyOptimizers) -> Callable[[], Any] | None:
        """Return the optimiser's step, if that is all that there is to do; None if there is more."""
        is_default = type(optimizers.of(self._optimizer)) is StrategyOptimizer
        if not is_default or not self._needs_no_closure or self._scaler is not None:
            return None
        step = plain_step(self._optimizer)
        return step if self._recovery is None else self._recovery.repeatable(self._optimizer, step)

    def _start_scaler(self, device: torch.device) -> "ScaledSteps | None":
        if self._scaler is None:
            return None
        from equipoise.trainer.optimization.steps.scaled_steps import ScaledSteps

        # A scaler begins to work with the first loss, but a process may have no loss in its first window.
        self._scaler.scale(torch.zeros((), device=device))
        return ScaledSteps(self._scaler)

    def unscale(self, optimizer: Any) -> None:
        """Do nothing: the gradients are unscaled before the user sees them."""

    def close(self) -> None:
        """Remove the hooks on parameters and optimisers, at the end of the epoch or after a failure."""
        if self._in_backward is not None:
            self._in_backward.close()
        if self._scaled_steps is not None:
            self._scaled_steps.close()

    @property
    def has_skipped(self) -> bool:
        """True if the scaler has skipped the last step of the optimiser."""
        return self._scaled_steps is not None and self._scaled_steps.are_skipped

    def __call__(self, parts: Sequence[Any], batch_idx: int, last: bool) -> StepResult:
        """Compute the gradients of a batch and, if it is the last of its window, step the optimiser."""
        step = self.step
        step.begin_batch(batch_idx)
        if not last:
            result = self._forward_backward(step, parts, False)
            if not self._needs_no_closure:
                self._loss_of_closure(parts, result)
            return result

        # The window ends with this batch.
        counts = self._counts
        counts.ready += 1
        if self._needs_no_closure:
            optimizer = self._optimizer
            result = self._compute_last(step, parts, True)
            if self._in_backward is not None:
                self._in_backward.finish()
            else:
                skipped = self._gradients.finish(optimizer, result.loss is None)
                if self._plain_step is not None:
                    self._plain_step()
                else:
                    self._take_step(optimizer, skipped)
        else:
            result = self._step_with_closure(parts, batch_idx)
        counts.completed = counts.ready

        # The next window begins.
        if self._gradients.are_weighed:
            self._window.reset()
            if self._recovery is not None:
                self.step.end_window()
        return result

    def end_window(self, batch_idx: int) -> None:
        """Step the optimiser with the gradients of a window that ends before its last batch."""
        usual = self._compute_last
        if self._is_alone:
            self._compute_last = lambda *_: NO_RESULT
        self._ends_early = True
        try:
            # The number of the missing batch: no window begins with it.
            self((), batch_idx + 1, True)
        finally:
            self._compute_last = usual
            self._ends_early = False

    def _compute_and_follow_later(self, step: Any, parts: Sequence[Any], last: bool) -> StepResult:
        with self.step.follow_later() as self._gradients.follow:
            return self._forward_backward(step, parts, last)

    def _step_with_closure(self, parts: Sequence[Any], batch_idx: int) -> StepResult:
        """Pass a closure that computes loss and gradients to the optimiser, or to the user's `optimizer_step`."""
        results: list[StepResult] = []
        window_before = self._window.state_dict()

        def closure() -> Tensor | None:
            # LBFGS computes a batch several times, and the window counts it once.
            self._window.load_state_dict(window_before)
            self.step.begin_batch(batch_idx)
            if results and not self.step.begins_window:
                raise _computed_again(self._optimizer)
            with torch.enable_grad():
                result = self._compute_last(self.step, parts, True)
            results[:] = [result]
            if self._user_step is not None:
                # The user may read the gradients, and step the optimiser without a closure.
                self._gradients.weigh(self._optimizer, result.loss is None)
            loss = self._loss_of_closure(parts, result)
            if self._reduce is not None:
                loss = self._mean_loss(self._reduce, loss, result)
            return loss

        # A LightningOptimizer calls `optimizer_step` below with the closure.
        if self._user_step is not None:
            last_idx = batch_idx
            if self._ends_early:
                last_idx -= 1
            self._user_step(self._state.current_epoch, last_idx, self._lightning_optimizer, closure)
        else:
            assert self._lightning_optimizer is not None
            self._lightning_optimizer.step(closure=closure)

        # Neither the optimiser nor the user has run the closure.
        if not results:
            self._counts.complete_ready()
            raise closure_not_called()
        return results[0]

    def _loss_of_closure(self, parts: Sequence[Any], result: StepResult) -> Tensor | None:
        """Return the loss for optimisers and users that read it; without a batch that of the last one, or zero."""
        if parts:
            self._last_loss = self._visible_loss(result)
            return self._last_loss
        if self._last_loss is None:
            return torch.zeros(())
        return self._last_loss

    def _mean_loss(self, reduce: Callable[..., Any], loss: Tensor | None, result: StepResult) -> Tensor | None:
        """Return the mean loss over the samples of all processes; without any sample that of this process."""
        sums = torch.zeros(2, dtype=torch.float64)
        # A loss without weight may be no number.
        if loss is not None and result.loss is not None and result.weight:
            weight = float(result.weight)
            sums = torch.tensor([float(loss) * weight, weight], dtype=torch.float64)
        total, samples = reduce(sums, reduce_op="sum").tolist()
        if not samples:
            return loss
        if loss is None:
            loss = torch.zeros(())
        return torch.full_like(loss, total / samples)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, then all up to the optimiser's step; a LightningOptimizer calls this.

        Raises:
            StepError: If one of several optimisers is to be stepped by itself.
        """
        if self._are_several and optimizer is not self._optimizer:
            raise StepError(
                f"{type(optimizer).__name__} cannot be stepped by itself: automatic optimisation steps all optimisers"
                " together. Step the optimiser that `optimizer_step` receives, which stands for all of them, or set"
                " `self.automatic_optimization = False`."
            )
        if self._scaler is not None:
            loss = closure()
            skipped = self._gradients.finish(optimizer, loss is None)
            return self._take_step(optimizer, skipped, **kwargs)

        def compute() -> Any:
            loss = closure()
            self._gradients.finish(optimizer, loss is None)
            return loss

        return self._optimizers.of(optimizer).step(compute, **kwargs)

    def _take_step(self, optimizer: Optimizer, skipped: bool, **kwargs: Any) -> Any:
        """Step the optimiser after its gradients are finished. A scaler cannot step without any gradient."""
        strategy_optimizer = self._optimizers.of(optimizer)
        scaled_steps = self._scaled_steps
        if scaled_steps is None:
            return strategy_optimizer.step(**kwargs)
        scaled_steps.begin()
        if skipped:
            return strategy_optimizer.skip()
        result = scaled_steps.take(strategy_optimizer, **kwargs)
        scaled_steps.scaler.update()
        return result

    def _visible_loss(self, result: StepResult) -> Tensor | None:
        """Return the loss for hooks and optimisers: detached, and divided by the parts of the window."""
        if result.loss is None:
            return None
        loss = result.loss.detach()
        if self._window.parts > 1:
            return loss / self._window.parts
        # A copy: what is done to it in place must not change the loss.
        return loss.clone()

    def outputs(self, result: StepResult) -> dict[str, Any]:
        """Return what `on_train_batch_end` receives."""
        # 1. The loss alone.
        loss = self._visible_loss(result)
        if loss is None:
            return {}
        returned = result.outputs
        if isinstance(returned, Tensor):
            return {"loss": loss}

        # 2. The outputs of all parts, if the batch was computed in parts.
        is_gathered = isinstance(returned, PartialOutputs)
        if is_gathered:
            if not self._gathers_outputs:
                return {"loss": loss}
            returned = returned.gathered()

        # 3. All else that `training_step` returned. Its loss has the graph and is replaced.
        outputs: dict[str, Any] = {"loss": loss}
        if isinstance(returned, Mapping):
            outputs.update(returned)
            outputs["loss"] = loss
        # Gathering averages numbers, but the weight of a batch is the sum of its parts' weights.
        if is_gathered and "loss_weight" in outputs:
            outputs["loss_weight"] = result.weight
        return outputs


def _computed_again(optimizer: Optimizer) -> StepError:
    return StepError(
        f"{type(optimizer).__name__} computes a batch again within an accumulation window, whose earlier batches are"
        " gone. Take accumulate_grad_batches=1 with larger batches, or another optimiser; or set"
        " `self.automatic_optimization = False`, and step with a closure that computes all batches of the window."
    )


def _are_several(optimizers: Sequence[Optimizer], module: LightningModule) -> bool:
    """Return True if several optimisers are stepped as one, which are checked: callbacks may have added parameters."""
    if len(optimizers) == 1:
        return False
    from equipoise.trainer.optimization.configuration.several_optimizers import check_disjoint

    check_disjoint(optimizers, module)
    return True


def _check_scaler(scaler: GradScaler | None, optimizer: Optimizer) -> None:
    """Check that an optimiser can be used with a scaler of the loss."""
    if scaler is not None and isinstance(optimizer, LBFGS):
        raise ConfigurationError(
            "precision='16-mixed' scales the loss, which LBFGS cannot take. Choose bf16-mixed or another optimiser."
        )
