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
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from equipoise.errors import ConfigurationError, StepError
from equipoise.interop.lightning.optimizers import closure_not_called
from equipoise.interop.torch.optimizers import unscales_by_itself
from equipoise.memory.out_of_memory import Phase
from equipoise.parallel.batches.gathering import PartialOutputs
from equipoise.parallel.batches.weighting import AccumulationWindow, Weight
from equipoise.parallel.step_protocols import StepResult
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.diagnostics.device_mismatch import EXPLAINED, explain_device_mismatch
from equipoise.trainer.optimization.backward import Backward
from equipoise.trainer.optimization.batch_weight import BatchWeight, check_weight
from equipoise.trainer.optimization.manual import ManualOptimization
from equipoise.trainer.optimization.module_step import ModuleStep
from equipoise.trainer.optimization.optimizers import takes_no_closure
from equipoise.trainer.recovery.micro_batching import is_armed
from equipoise.trainer.recovery.recovery import Recovery

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext

__all__ = ["AutomaticOptimization", "ManualOptimization", "make_optimization"]


ForwardBackward = Callable[[Any, Sequence[Any], bool], StepResult]
Weigh = Callable[[Any, int], int]  # a part of a batch and the batch's number, to its weight

_made = tuple.__new__  # a named tuple without the way through its defaults


def make_optimization(
    context: "RunContext",
    window: AccumulationWindow,
    weigh: BatchWeight,
    *,
    skip_backward: bool,
    count_skipped: Callable[[], None],
) -> "AutomaticOptimization | ManualOptimization":
    """The way of optimisation that the module asks for.

    Args:
        context: The run.
        window: The accumulation window.
        weigh: Finds the weight of a batch.
        skip_backward: Run the forward only.
        count_skipped: Called when `training_step` has returned None.
    """
    if context.module.automatic_optimization:
        return AutomaticOptimization(context, window, weigh, skip_backward=skip_backward, count_skipped=count_skipped)
    return ManualOptimization(context)


class _AutomaticStep(ModuleStep):
    """Runs the training step and, as `backward`, everything from zeroing the gradients to `on_after_backward`."""

    def __init__(
        self,
        context: "RunContext",
        window: AccumulationWindow,
        weigh: BatchWeight,
        zero_grad: Callable[[int], None],
        *,
        skip_backward: bool,
        count_skipped: Callable[[], None],
    ) -> None:
        super().__init__(context, "training_step")
        self.count_skipped = count_skipped
        self.batch_idx = 0
        self.alone = context.strategy.processes.world_size == 1
        self.weigher = weigh
        unweighed = window.parts == 1 and self.alone and not context.strategy.goes_back_in_parts
        self.weigh: Weigh | None = None if unweighed else weigh
        self.usual_weigher = self.weigh
        self.window, self.zero_grad, self.skip_backward = window, zero_grad, skip_backward
        self.run_backward = Backward(context)
        self.begins_window = True  # whether the gradients of an earlier window are still there

    def __call__(self, part: Any) -> StepResult:
        """Runs the training step on a batch and takes its answer apart."""
        if self.is_plain:
            try:
                out = self.method(part, self.batch_idx)
            except EXPLAINED as error:
                explain_device_mismatch(error, self.module, part)
                raise
        else:
            out = self.run(part)
        loss, weight = out, None
        if not isinstance(out, Tensor):
            if out is None:
                self.count_skipped()
                return StepResult(None, 0, None)
            loss, weight = _loss_and_weight(out)
        if self.weigh is not None:
            weight = self.weigh(part, self.batch_idx) if weight is None else check_weight(weight)
        return _made(StepResult, (loss, weight, out, ()))

    def result(self, out: Any, size: int, logged: Sequence[Any]) -> StepResult:
        """What a step on a part came to; it weighs as many samples as it has unless the user says otherwise."""
        if out is None:
            self.count_skipped()
            return StepResult(None, 0, None, logged)
        loss, weight = (out, None) if isinstance(out, Tensor) else _loss_and_weight(out)
        return StepResult(loss, size if weight is None else check_weight(weight), out, logged)

    def begin_micro_batch(self, size: int, batch_size: int) -> None:
        """Note that the next part is a micro-batch; see `AccumulationWindow.micro_batch`."""
        self.window.micro_batch = (size, batch_size)

    def total_with(self, result: StepResult) -> Weight:
        """Σw of the window, this result included."""
        return self.window.total_with(0 if result.weight is None else result.weight)

    def backward(self, result: StepResult) -> None:
        """Zeroes the gradients at the beginning of a window, then runs the backward with the part's share."""
        if self.skip_backward:
            return
        if self.begins_window:
            self.begins_window = False
            self.zero_grad(self.batch_idx)
        loss, weight = result.loss, result.weight
        if loss is None:
            if not self.alone:
                self.window.add(0)  # the first part fixes the reference weight, in all processes
            return
        if self.weigh is None or weight is None:
            self.run_backward(loss)
        elif isinstance(weight, Tensor) or weight:
            self.run_backward(loss, self.window.add(weight), self.window.parts)
        elif not self.alone:
            self.window.add(0)


class _WatchedStep(_AutomaticStep):
    """Tells how far it came.

    Attributes:
        phase: "forward" or "backward".
    """

    phase: Phase = "forward"

    def __call__(self, part: Any) -> StepResult:
        """Runs the training step on a batch."""
        self.phase = "forward"
        return _AutomaticStep.__call__(self, part)  # quicker than by super()

    def backward(self, result: StepResult) -> None:
        """Runs the backward."""
        self.phase = "backward"
        _AutomaticStep.backward(self, result)


class AutomaticOptimization:
    """The trainer zeroes gradients, runs the backward, clips and steps.

    Called with the parts of a batch, its index, and whether the accumulation window ends with it.
    """

    def __init__(
        self,
        context: "RunContext",
        window: AccumulationWindow,
        weigh: BatchWeight,
        *,
        skip_backward: bool,
        count_skipped: Callable[[], None],
    ) -> None:
        trainer, hooks = context.trainer, context.hooks
        self.trainer, self.module, self.strategy, self.window = trainer, context.module, context.strategy, window
        self.scaler, self.counts = context.precision.scaler, trainer.progress.optimizer_step.current
        self.zero_grads = trainer.progress.zero_grad.current
        processes = self.strategy.processes
        window.sync_reference = None if processes.world_size == 1 else processes.broadcast
        kind = type(self.strategy)
        # What a strategy leaves as it is and would do nothing is not called.
        whole = window.parts == 1 and not kind.goes_back_in_parts
        alone = kind.finish_gradients is Strategy.finish_gradients and whole
        self.finish = None if alone else self.strategy.finish_gradients
        neutral = kind.optimizer_step is Strategy.optimizer_step
        self.step_optimizer = None if neutral else self.strategy.optimizer_step
        self.optimizer: Optimizer = trainer.optimizers[0]
        armed = is_armed(context) and not skip_backward
        self.step = (_WatchedStep if armed else _AutomaticStep)(
            context, window, weigh, self._zero_grad, skip_backward=skip_backward, count_skipped=count_skipped
        )
        self.recovery = Recovery(context, self.step) if armed else None
        self.forward_backward: ForwardBackward = self.recovery or self.strategy.forward_backward
        self.step_scaled: Callable[..., Any] | None = None
        if self.scaler is not None:
            self.step_scaled = partial(self.strategy.scaled_step, self.scaler)
        if self.recovery is not None:
            self.finish = self.recovery.finish_gradients if alone else self.strategy.finish_gradients
            self.step_optimizer = self.recovery.optimizer_step
            if self.step_scaled is not None:
                self.step_scaled = self.recovery.surviving(self.step_scaled)
        self.before_zero_grad = hooks.bind("on_before_zero_grad")
        self.user_zero_grad = hooks.bind_module("optimizer_zero_grad")
        self.before_step = hooks.bind("on_before_optimizer_step")
        self.user_clip = hooks.bind_module("configure_gradient_clipping")
        self.user_step = hooks.bind_module("optimizer_step")
        self.own_zero_grad = getattr(self.optimizer.zero_grad, "__func__", None) is Optimizer.zero_grad
        self.direct = self.user_step is None and (self.scaler is not None or takes_no_closure(self.optimizer))
        self.lightning_optimizer = None if self.direct else trainer.lightning_optimizers[0]
        self.backward = self.step.run_backward
        self.gathers = hooks.reads_outputs("on_train_batch_end")  # what parts of a batch returned
        self._check()

    def _check(self) -> None:
        clip = self.trainer.gradient_clip_val
        if self.scaler is None:
            return
        if isinstance(self.optimizer, LBFGS):
            raise ConfigurationError(
                "precision='16-mixed' scales the loss, which LBFGS cannot take. Choose bf16-mixed or another optimiser."
            )
        if clip and unscales_by_itself(self.optimizer):
            raise ConfigurationError(
                f"{type(self.optimizer).__name__}(fused=True) unscales gradients in its own step, too late for"
                f" gradient_clip_val={clip}."
                " Take fused=False, or precision='bf16-mixed'."
            )

    def __call__(self, parts: Sequence[Any], batch_idx: int, last: bool) -> StepResult:
        """Computes the gradients of a batch and, if it is the last of its window, steps."""
        step = self.step
        step.batch_idx, step.indices = batch_idx, (batch_idx,)
        step.begins_window = batch_idx % self.window.parts == 0
        if not last:
            return self.forward_backward(step, parts, False)
        counts = self.counts
        counts.ready += 1
        if self.direct:
            result = self.forward_backward(step, parts, True)
            self._finish(self.optimizer, result.loss is None)
        else:
            result = self._step_with_closure(parts, batch_idx)
        counts.completed = counts.ready
        if self.finish is not None:
            self.window.reset()
            if self.recovery is not None:
                self.recovery.end_window()
        return result

    def _step_with_closure(self, parts: Sequence[Any], batch_idx: int) -> StepResult:
        """Hands the optimiser, or the user's `optimizer_step`, a closure that computes loss and gradients."""
        results: list[StepResult] = []
        before = self.window.state_dict()

        def closure() -> Tensor | None:
            self.window.load_state_dict(before)  # LBFGS computes a batch several times, and it counts once
            self.step.begins_window = batch_idx % self.window.parts == 0
            with torch.enable_grad():
                results[:] = [self.forward_backward(self.step, parts, True)]
            return self._seen_loss(results[0])

        if self.user_step is not None:
            self.user_step(self.trainer.current_epoch, batch_idx, self.lightning_optimizer, closure)
        else:
            assert self.lightning_optimizer is not None
            self.lightning_optimizer.step(closure=closure)
        if not results:
            self.counts.completed = self.counts.ready
            raise closure_not_called()
        return results[0]

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """What a LightningOptimizer calls: the closure, then everything up to the step."""
        if self.scaler is not None:
            answer = closure()
            return self._finish(optimizer, answer is None, **kwargs)

        def wrapped() -> Any:
            answer = closure()
            self._prepare(optimizer, answer is None)
            return answer

        step = self.step_optimizer or self.strategy.optimizer_step
        return step(optimizer, wrapped, **kwargs)

    def _finish(self, optimizer: Optimizer, skipped: bool, **kwargs: Any) -> Any:
        """Everything after the last backward of a window."""
        skipped = self._prepare(optimizer, skipped)
        if self.scaler is None:
            step = self.step_optimizer
            return optimizer.step(**kwargs) if step is None else step(optimizer, **kwargs)
        if skipped:
            return None
        assert self.step_scaled is not None
        answer = self.step_scaled(optimizer, **kwargs)
        self.scaler.update()
        return answer

    def _prepare(self, optimizer: Optimizer, skipped: bool) -> bool:
        """Weighs, unscales and clips the gradients; returns whether there are none."""
        if self.finish is not None and (nobody := self.finish(self.window, optimizer)) is not None:
            skipped = nobody
        if self.scaler is not None and not skipped and not unscales_by_itself(optimizer):
            self.strategy.unscale_gradients(self.scaler, optimizer)
        if self.before_step is not None:
            self.before_step(optimizer)
        value, algorithm = self.trainer.gradient_clip_val, self.trainer.gradient_clip_algorithm
        if self.user_clip is not None:
            self.user_clip(optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm)
        elif value:
            self.strategy.clip_gradients(optimizer, value, algorithm or "norm")
        return skipped

    def _zero_grad(self, batch_idx: int) -> None:
        optimizer, counts = self.optimizer, self.zero_grads
        counts.ready += 1
        if self.before_zero_grad is not None:
            self.before_zero_grad(optimizer)
        counts.started = counts.ready
        if self.user_zero_grad is not None:
            self.user_zero_grad(self.trainer.current_epoch, batch_idx, optimizer)
        elif self.own_zero_grad:  # the same, without the profiler's record that optimizer.zero_grad() opens
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            optimizer.zero_grad()
        counts.completed = counts.ready

    def _seen_loss(self, result: StepResult) -> Tensor | None:
        """The loss as others see it: detached, and divided by the parts of the window."""
        if result.loss is None:
            return None
        loss = result.loss.detach()
        return loss / self.window.parts if self.window.parts > 1 else loss.clone()

    def outputs(self, result: StepResult) -> dict[str, Any]:
        """What `on_train_batch_end` receives."""
        loss = self._seen_loss(result)
        if loss is None:
            return {}
        if isinstance(result.outputs, Tensor):
            return {"loss": loss}
        out = result.outputs
        if isinstance(out, PartialOutputs):
            if not self.gathers:
                return {"loss": loss}
            out = out.gathered()
        extra = out if isinstance(out, Mapping) else {}
        outputs = {"loss": loss, **{key: value for key, value in extra.items() if key != "loss"}}
        if out is not result.outputs and "loss_weight" in outputs:
            outputs["loss_weight"] = result.weight  # of the whole batch; others of its kind are averaged
        return outputs


def _loss_and_weight(out: Any) -> tuple[Tensor, Weight | None]:
    """The loss and its weight in what `training_step` returned, which is no tensor."""
    if not isinstance(out, Mapping):
        raise StepError(
            "`training_step` must return a tensor, a dictionary with the key 'loss', or None to skip the batch, not"
            f" {type(out).__name__}."
        )
    loss = out.get("loss")
    if loss is None:
        raise StepError(
            f"`training_step` returned a dictionary without 'loss'; its keys are {list(out)}. Return the loss under"
            " that key, or None to skip the batch."
        )
    if not isinstance(loss, Tensor):
        raise StepError(
            f"`training_step` must return the loss as a tensor with its graph, but under 'loss' is {loss!r} of type"
            f" {type(loss).__name__}."
        )
    return loss, out.get("loss_weight")
