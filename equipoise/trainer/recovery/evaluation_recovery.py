"""Recovery of an evaluation step from an out-of-memory error: restore the state, and run the step in micro-batches."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule

from equipoise.memory.out_of_memory import is_out_of_memory
from equipoise.parallel.snapshot.batch_contents import BatchContents
from equipoise.parallel.snapshot.state_snapshot import StepSnapshot
from equipoise.parallel.step_protocols import StepResult
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.logging.logs import Logs
from equipoise.trainer.recovery.captured_error import CapturedError, raise_with_advice
from equipoise.trainer.recovery.micro_batching import FittingSizes, MicroBatcher
from equipoise.trainer.state.run_state import RunState

__all__ = ["EvaluationRecovery"]


class EvaluationRecovery:
    """Evaluate batches like the strategy's `evaluate`, also when memory runs out.

    Args:
        state: Contains the optimisers and counters.
        module: The user's module.
        strategy: The strategy.
        hooks: The hooks, among them those that decide.
        logs: The logged values.
        fitting_sizes: The sizes that fit in this stage, as far as they are known.
    """

    def __init__(
        self,
        state: RunState,
        module: LightningModule,
        strategy: Strategy,
        hooks: Hooks,
        logs: Logs,
        fitting_sizes: FittingSizes,
    ) -> None:
        self._strategy = strategy
        self._logs = logs
        self._strategy.recovery.enable()
        self._snapshot = StepSnapshot(module, strategy.devices)
        self._micro_batcher = MicroBatcher(state, module, strategy, hooks, self._evaluate_micro_batch, fitting_sizes)
        self._step: Any = None

    def __call__(self, step: Any, parts: Sequence[Any]) -> Any:
        """Return the output of an evaluation step; see `Strategy.evaluate`."""
        # 1. Note what the step may change.
        micro_batcher = self._micro_batcher
        micro_batcher.with_second_attempt(self._snapshot.mark)
        contents = BatchContents(tuple(parts))
        measure = micro_batcher.measure(parts)
        num_pending = len(self._logs.pending)
        count = micro_batcher.count(measure)
        self._step = step

        while True:
            # 2. Run it.
            try:
                if count <= 1:
                    output = self._strategy.evaluate(step, parts)
                else:
                    output = micro_batcher.run(step, parts, count).outputs
                micro_batcher.note_success(measure)
                return output
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                captured = CapturedError.of(error)

            # 3. Outside of `except`, whose traceback keeps the failed attempt alive: ask, and restore the state.
            contents.restore()
            refusal = self._strategy.recovery.why_not(training=False, leave_out=False)
            event = micro_batcher.event(captured, "evaluation", step.indices[0], parts, count, refusal)
            split = micro_batcher.ask(event)
            del self._logs.pending[num_pending:]
            micro_batcher.with_second_attempt(self._snapshot.restore)

            # 4. A batch cannot be left out: it would be missing in the metrics.
            if refusal or split is None or not split.parts:
                raise_with_advice(captured, event, refusal)
            count = split.parts
            if count > 1:
                micro_batcher.note_failure(parts, split)
                measure = micro_batcher.measure(parts)
            micro_batcher.free_memory()

    def _evaluate_micro_batch(self, micro_batch: Sequence[Any], is_last: bool) -> StepResult:
        size = self._micro_batcher.size(micro_batch)
        return StepResult(None, size, self._strategy.evaluate(self._step, micro_batch))
