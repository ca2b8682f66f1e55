"""Recovery from an out-of-memory error: restore the step and run it again in micro-batches.

    window begins       note random generators, buffers, metrics, logs
    batch               compute it, in as many micro-batches as batches of its kind last needed
      out of memory     release the failed attempt, ask the callbacks, restore everything,
                        compute the window anew: its earlier batches as they were, this one in more micro-batches

A batch in micro-batches has the result of the whole batch: gradients by weight, logs by their own reduction. The
hooks around a backward fire for each micro-batch. Where an error is raised after all, it says what would help.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from equipoise.memory.out_of_memory import is_out_of_memory
from equipoise.parallel.optimizer_parameters import optimizer_parameters
from equipoise.parallel.snapshot.batch_contents import BatchContents
from equipoise.parallel.snapshot.state_snapshot import StepSnapshot
from equipoise.parallel.step_protocols import NO_RESULT, StepResult
from equipoise.parallel.strategy_optimizer import StrategyOptimizer
from equipoise.strategies.portable_state import gradients_of, load_gradients
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.logging.logs import Logs
from equipoise.trainer.recovery.captured_error import CapturedError, raise_with_advice
from equipoise.trainer.recovery.micro_batching import FittingSizes, Measure, MicroBatcher
from equipoise.trainer.recovery.repeatable_optimizer import RepeatableOptimizer
from equipoise.trainer.state.run_state import RunState

__all__ = ["Recovery"]


@dataclass(slots=True)
class _Batch:
    """A batch of the window.

    Attributes:
        parts: The batch, as the strategy has placed it.
        batch_idx: The number of the batch.
        contents: The contents of the batch before the step.
        count: The number of micro-batches. 0: the batch is left out.
        measure: Kind and size of the batch, if they are known.
        size: The number of samples, if it is computed in micro-batches.
    """

    parts: Sequence[Any]
    batch_idx: int
    contents: BatchContents
    count: int = 1
    measure: Measure | None = None
    size: int = 0


@dataclass
class _OpenWindow:
    """The batches of a window that were computed so far.

    Attributes:
        batches: The batches. The last one is the present one.
        num_pending: Number of values that were logged before the present batch.
        start: State of the window's weights at its first batch, and the gradient of each parameter; None if the window
            began with that batch.
        has_reference: Whether the reference weight stays after a failed attempt.
        ends: Whether the window ends with the present batch.
    """

    batches: list[_Batch] = field(default_factory=list)
    num_pending: int = 0
    start: tuple[dict[str, Any], list[Tensor | None]] | None = None
    has_reference: bool = False
    ends: bool = True

    def add(self, batch: _Batch, num_pending: int, *, ends: bool) -> None:
        self.batches.append(batch)
        self.num_pending = num_pending
        self.ends = ends


class Recovery:
    """Compute gradients like the strategy's `forward_backward`, also when memory runs out."""

    def __init__(
        self,
        state: RunState,
        module: LightningModule,
        strategy: Strategy,
        hooks: Hooks,
        logs: Logs,
        step: Any,
        fitting_sizes: FittingSizes,
    ) -> None:
        self._state = state
        self._step = step
        self._weights = step.window
        self._logs = logs
        self._strategy = strategy
        self._strategy.recovery.enable()
        self._snapshot = StepSnapshot(module, strategy.devices)
        self._micro_batcher = MicroBatcher(state, module, strategy, hooks, self._compute, fitting_sizes)
        self._window: _OpenWindow | None = None
        # The batch that is computed: the present one, or an earlier one of the window again.
        self._running: _Batch | None = None

    # One batch

    def __call__(self, step: Any, parts: Sequence[Any], last: bool) -> StepResult:
        """Compute the gradients of a batch; see `Strategy.forward_backward`."""
        # 1. Note what is needed to compute the window again.
        window = self._window_of(step)
        measure = self._micro_batcher.measure(parts)
        count = self._micro_batcher.count(measure)
        batch = _Batch(parts, step.batch_idx, BatchContents(tuple(parts)), count, measure)
        window.add(batch, len(self._logs.pending), ends=last)
        self._running = batch

        # 2. Compute the batch, until memory suffices or the error is raised. After an error the whole window is
        #    computed again.
        begin = len(window.batches) - 1
        is_usual = count == 1 and bool(parts)
        while True:
            try:
                if is_usual:
                    # The shortest way.
                    result = self._strategy.forward_backward(step, parts, last)
                else:
                    result = self._run(window.batches[begin:])
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                captured = CapturedError.of(error)
            # Outside of `except`, whose traceback keeps the failed attempt alive.
            self._prepare_repeat(window, captured)
            begin = 0
            is_usual = False

        # 3. Learn from it.
        if parts:
            self._micro_batcher.note_success(batch.measure)
        if last:
            window.batches.clear()
        return result

    def _window_of(self, step: Any) -> _OpenWindow:
        """Return the open window. A new one begins with a snapshot of what its steps may change."""
        is_first = step.batch_idx % self._weights.parts == 0
        if self._window is None or is_first:
            self._micro_batcher.with_second_attempt(self._snapshot.mark)
            # A resumed run begins in the midst of a window.
            start = None
            if not is_first:
                start = (self._weights.state_dict(), _copies(gradients_of(self._state.optimizers)))
            # Where there are several processes, the reference weight is exchanged once, by all of them.
            has_reference = self._weights.has_reference or self._weights.sync_reference is not None
            self._window = _OpenWindow(start=start, has_reference=has_reference)
        return self._window

    def _run(self, batches: Sequence[_Batch]) -> StepResult:
        """Compute these batches of the window. Only the last one is the present one; others do not log again."""
        present = batches[-1]
        for batch in batches[:-1]:
            self._begin(batch)
            self._step.capture_logs(lambda batch=batch: self._run_batch(batch))
        self._begin(present)
        return self._run_batch(present)

    def _begin(self, batch: _Batch) -> None:
        self._running = batch
        self._step.repeat_batch(batch.batch_idx)

    def _run_batch(self, batch: _Batch) -> StepResult:
        if batch.count > 1:
            batch.size = self._micro_batcher.size(batch.parts)
            return self._micro_batcher.run(self._step, batch.parts, batch.count)
        if batch.count == 1:
            return self._compute(batch.parts, True)
        # The batch is left out. Other processes wait for this one to take part in the exchange without a batch.
        if self._strategy.processes.world_size > 1:
            return self._compute((), True)
        # As if its step had returned None.
        self._step.backward(NO_RESULT)
        return NO_RESULT

    def _compute(self, parts: Sequence[Any], is_last: bool) -> StepResult:
        window = self._window
        running = self._running
        assert window is not None
        assert running is not None
        ends_window = is_last and window.ends and running is window.batches[-1]
        if self._step.in_micro_batches:
            self._step.begin_micro_batch(self._micro_batcher.size(parts), running.size)
        return self._strategy.forward_backward(self._step, parts, ends_window)

    # After an error

    def _prepare_repeat(self, window: _OpenWindow, captured: CapturedError) -> None:
        """Ask the callbacks, restore the state at the beginning of the window, and split the batch that failed."""
        batch = self._running
        assert batch is not None
        # 1. Ask.
        for window_batch in window.batches:
            window_batch.contents.restore()
        refusal = self._strategy.recovery.why_not(training=True, leave_out=False)
        phase = self._step.phase
        event = self._micro_batcher.event(captured, phase, batch.batch_idx, batch.parts, batch.count, refusal)
        split = self._micro_batcher.ask(event)

        # 2. Restore, also for those who catch the error.
        others_have_gradients = self._roll_back(window)

        # 3. Refuse.
        if split is None:
            raise_with_advice(captured, event, refusal)
        leaves_out = split.parts == 0
        obstacle = self._strategy.recovery.why_not(training=True, leave_out=leaves_out)
        if others_have_gradients and leaves_out and not obstacle:
            obstacle = (
                "It cannot be left out: others have a part of its gradients. OOMRecovery(policy='split') can cut it."
            )
        if obstacle:
            raise_with_advice(captured, event, obstacle)

        # 4. Split.
        self._strategy.recovery.reduce_share()
        batch.count = split.parts
        if split.parts > 1:
            self._micro_batcher.note_failure(batch.parts, split)
            for window_batch in window.batches:
                window_batch.measure = self._micro_batcher.measure(window_batch.parts)
        self._step.release_memory()
        self._micro_batcher.free_memory()

    def _roll_back(self, window: _OpenWindow) -> bool:
        """Restore the state at the beginning of the window. Return True if other processes received gradients of it."""
        # 1. Logs, random generators, buffers and metrics.
        del self._logs.pending[window.num_pending :]
        self._micro_batcher.with_second_attempt(self._snapshot.restore)

        # 2. Weights. A reference weight of the failed attempt would show in the bits of the next one.
        self._weights.reset()
        if not window.has_reference:
            self._weights.forget_reference()

        # 3. Gradients. Those of an earlier window stay until they are zeroed.
        if window.start is not None:
            weights, gradients = window.start
            self._weights.load_state_dict(weights)
            # Copies: the next attempt adds to them, and may fail, too.
            load_gradients(self._state.optimizers, _copies(gradients))
        elif not self._step.begins_window:
            for optimizer in self._state.optimizers:
                for parameter in optimizer_parameters(optimizer):
                    parameter.grad = None
        return self._strategy.recovery.discard()

    # The optimiser's step

    def protect(self, strategy_optimizer: StrategyOptimizer) -> RepeatableOptimizer:
        """Return an optimiser whose step is repeated if memory ran out before anything was changed."""
        return RepeatableOptimizer(strategy_optimizer, self._micro_batcher, lambda: self._step.batch_idx)

    def repeatable(self, optimizer: Optimizer, step: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that steps an optimiser by another function, under the same protection."""
        return partial(self.protect(StrategyOptimizer(optimizer)).step_or_repeat, step)


def _copies(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if gradient is None else gradient.detach().clone() for gradient in gradients]
