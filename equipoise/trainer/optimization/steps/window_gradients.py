"""The gradients of an accumulation window: when they are zeroed, weighed by the strategy, unscaled and clipped."""

from collections.abc import Callable

from torch.optim import Optimizer

from equipoise.interop.torch.optimizers import unscales_by_itself
from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.parallel.strategy_optimizer import StrategyOptimizers
from equipoise.precision import Precision
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.optimization.steps.step_extension import InnerStep, step_extensions
from equipoise.trainer.state.run_state import RunState

__all__ = ["WindowGradients"]


class WindowGradients:
    """The gradients of the parameters of one optimiser.

    Args:
        state: The settings and counters.
        strategy: The strategy.
        hooks: The hooks.
        precision: The precision.
        window: The accumulation window.
        optimizer: What is stepped: the optimiser, or several of them as one.
        skip_backward: Whether batches have a forward only.

    Attributes:
        window: The accumulation window.
        optimizer: What is stepped.
        optimizers: The optimisers as the strategy steps them.
        scaler: Scales the loss; None: the loss is not scaled.
        in_backward: Steps the optimiser within the backward; None: it steps after the backward.
        is_shared: Whether several processes add to the window, or one does as several do.
        are_weighed: Whether `finish` may weigh the gradients. Then the window must be reset after a step.
        follow: Calls `on_after_backward` when the gradients are weighed; None: it has been called.
    """

    follow: Callable[[], None] | None = None
    # Whether there are no gradients, once they are weighed; None before.
    _skipped: bool | None = None

    def __init__(
        self,
        state: RunState,
        strategy: Strategy,
        hooks: Hooks,
        precision: Precision,
        window: AccumulationWindow,
        optimizer: Optimizer,
        *,
        skip_backward: bool,
    ) -> None:
        self._state = state
        self._strategy = strategy
        self.window = window
        self.optimizer = optimizer
        self.optimizers = StrategyOptimizers(strategy.setup_optimizer)
        self.scaler = precision.scaler
        processes = strategy.processes
        is_alone = processes.world_size == 1
        self.is_shared = not is_alone or processes.has_one_state
        window.sync_reference = None if is_alone else processes.broadcast

        # 1. Zeroing. Torch's own `zero_grad` opens a record of the profiler, so it is not called.
        self._counts = state.progress.zero_grad.current
        self._before_zero_grad = hooks.bind("on_before_zero_grad")
        self._user_zero_grad = hooks.bind_module("optimizer_zero_grad")
        self._is_torch_zero_grad = all(map(_zeroes_as_torch, state.optimizers))

        # 2. Weighing. A window of one backward in one process has gradients that are right already, unless the strategy
        #    or the recovery from an out-of-memory error computes a batch in micro-batches.
        self._weigh: Callable[[AccumulationWindow, Optimizer], bool | None] | None = None
        has_default_finish = type(strategy).finish_gradients is Strategy.finish_gradients
        is_one_part = window.parts == 1 and is_alone
        if not has_default_finish or not is_one_part:
            action = hooks.action_of_strategy("finish_gradients")
            self._weigh = hooks.wrapped(strategy.finish_gradients, action)
        elif (hooks.recovers and not skip_backward) or not strategy.keeps_batches_whole:
            self._weigh = self._weigh_if_split
        self.are_weighed = self._weigh is not None

        # 3. What the user sees and changes.
        self._before_step = hooks.bind("on_before_optimizer_step")
        self._user_clip = hooks.bind_module("configure_gradient_clipping")

        # 4. The optimiser's step within the backward, if an extension takes it there.
        self.in_backward = None if skip_backward else self._inner_step()

    def _inner_step(self) -> InnerStep | None:
        state = self._state

        def clip(optimizer: Optimizer) -> None:
            if state.gradient_clip_val:
                self.clip(optimizer)

        for extension in step_extensions(state):
            inner_step = extension.inner_step(state, self.optimizer, self.zero, clip)
            if inner_step is not None:
                return inner_step
        return None

    @property
    def begin(self) -> Callable[[int], None]:
        """The function before the first backward of a window, which receives the number of the batch."""
        if self.in_backward is not None:
            return self.in_backward.begin
        return self.zero

    def zero(self, batch_idx: int) -> None:
        """Zero the gradients, with the hooks around it."""
        counts = self._counts
        optimizer = self.optimizer
        counts.ready += 1
        if self._before_zero_grad is not None:
            self._before_zero_grad(optimizer)
        counts.started = counts.ready
        if self._user_zero_grad is not None:
            self._user_zero_grad(self._state.current_epoch, batch_idx, optimizer)
        elif self._is_torch_zero_grad:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            optimizer.zero_grad()
        counts.completed = counts.ready

    def finish(self, optimizer: Optimizer, skipped: bool) -> bool:
        """Weigh, unscale and clip the gradients, in this order.

        Args:
            optimizer: The optimiser that holds the parameters.
            skipped: Whether the last step of this process has returned None.

        Returns:
            True if there are no gradients: no part of the window had a loss, in any process.
        """
        # 1. The weighted mean over the window and all processes.
        if self._skipped is None:
            self.weigh(optimizer, skipped)
        skipped = bool(self._skipped)
        self._skipped = None

        # 2. The scale of the loss; without gradients there is none. A fused optimiser divides by it in its step, unless
        #    gradients are seen or clipped before. Callbacks may change how they are clipped, so the settings are read
        #    in each step.
        value = self._state.gradient_clip_val
        if self.scaler is not None and not skipped and (value or self._unscales_early(optimizer)):
            self.optimizers.of(optimizer).unscale(self.scaler)

        # 3. The hook sees gradients before they are clipped.
        if self._before_step is not None:
            self._before_step(optimizer)

        # 4. Clipping.
        if self._user_clip is not None:
            algorithm = self._state.gradient_clip_algorithm
            self._user_clip(optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm)
        elif value:
            self.clip(optimizer)
        return skipped

    def weigh(self, optimizer: Optimizer, skipped: bool) -> None:
        """Weigh the gradients over the window and all processes, before `finish`; see there."""
        if self._weigh is not None:
            has_no_weight = self._weigh(self.window, optimizer)
            if has_no_weight is not None:
                skipped = has_no_weight
            elif self.window.is_open:
                # An earlier part of the window had a loss.
                skipped = False
        self._skipped = skipped
        if self.follow is not None:
            self.follow()
            self.follow = None

    def clip(self, optimizer: Optimizer) -> None:
        """Clip the gradients of an optimiser, as the settings say at present."""
        state = self._state
        assert state.gradient_clip_val is not None
        self._strategy.clip_gradients(optimizer, state.gradient_clip_val, state.gradient_clip_algorithm or "norm")

    def _unscales_early(self, optimizer: Optimizer) -> bool:
        """Return True if gradients must be unscaled before the optimiser's step."""
        if self._before_step is not None or self._user_clip is not None:
            return True
        return not unscales_by_itself(optimizer)

    def _weigh_if_split(self, window: AccumulationWindow, optimizer: Optimizer) -> bool | None:
        """Weigh the gradients of a batch that was split; a batch that was not split has added no weight."""
        if not window.is_open:
            return None
        return self._strategy.finish_gradients(window, optimizer)


def _zeroes_as_torch(optimizer: Optimizer) -> bool:
    return getattr(optimizer.zero_grad, "__func__", None) is Optimizer.zero_grad
