"""The steps of an evaluation or a prediction over the batches of one loader, with their hooks and counters."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule

from equipoise.precision import Precision
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.data.batch_stream import BatchStream
from equipoise.trainer.evaluation.evaluation_step import EvaluationStep
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.logging.logs import Logs
from equipoise.trainer.runtime.run_data import RunData
from equipoise.trainer.runtime.signals import EndOnSignal
from equipoise.trainer.state.progress import BatchProgress
from equipoise.trainer.state.run_state import RunState

if TYPE_CHECKING:
    from equipoise.trainer.recovery.micro_batching import FittingSizes

__all__ = ["STAGES", "EvaluationSteps"]

# Stages as in on_validation_start and predict_step.
STAGES = {"val": "validation", "test": "test", "predict": "predict"}


class EvaluationSteps:
    """Runs the steps of evaluations and predictions of one run.

    Args:
        state: Contains the optimisers and counters.
        module: The user's module.
        strategy: The strategy.
        hooks: The hooks.
        precision: The precision.
        logs: The logged values.
        data: The data of the run.
        end: Ends the run after a batch, once a signal came.
    """

    def __init__(
        self,
        state: RunState,
        module: LightningModule,
        strategy: Strategy,
        hooks: Hooks,
        precision: Precision,
        logs: Logs,
        data: RunData,
        end: EndOnSignal,
    ) -> None:
        self._state = state
        self._module = module
        self._strategy = strategy
        self._hooks = hooks
        self._precision = precision
        self._logs = logs
        self._data = data
        self._end = end
        # The sizes that fit into memory, as far as they are known, of each stage.
        self._fitting_sizes: dict[str, FittingSizes] = defaultdict(dict)

    def run(
        self,
        stage: str,
        stream: BatchStream,
        progress: BatchProgress,
        dataloader_idx: int,
        num_loaders: int,
        after: Callable[[Any], None],
        *,
        note_batch: Callable[[int], None] | None = None,
    ) -> None:
        """Run the steps over one loader.

        Args:
            stage: "val", "test" or "predict".
            stream: The pass over the loader.
            progress: Counts the steps over all loaders.
            dataloader_idx: Index of the loader.
            num_loaders: Number of loaders.
            after: Called with the output of each batch, after its hooks.
            note_batch: Called with the index of each batch before its hooks. Default: None, nothing is.
        """
        # 1. Bound once for all batches.
        word = STAGES[stage]
        state = self._state
        logs = self._logs
        batch_start = self._hooks.bind(f"on_{word}_batch_start")
        batch_end = self._hooks.bind(f"on_{word}_batch_end")
        step = self._step(stage)
        loop = "Prediction" if stage == "predict" else "Evaluation"
        batches = self._data.batches(stream, f"[_{loop}Loop].{stage}_next")
        final = dataloader_idx == num_loaders - 1
        # The index of the loader is an argument of hooks, and a part of names, only if there are several.
        loader_index: tuple[int, ...] = (dataloader_idx,) if num_loaders > 1 else ()
        log_index = dataloader_idx if num_loaders > 1 else None
        drawn = stream.counts.of
        counts = progress.current
        place = self._strategy.batch_to_devices
        transfer = self._data.make_transfer(dataloader_idx)
        evaluate = self._evaluator(stage)
        index = -1
        for batch in batches:
            index += 1
            progress.is_last_batch = final and index + 1 == stream.length
            # 2. Copy the batch to the devices, in parts.
            parts = place(batch, transfer)
            batch = parts[0] if len(parts) == 1 else batch
            counts.make_ready()
            logs.begin_batch(batch, log_index, drawn(index))
            indices = (index, *loader_index)
            step.begin_batch(*indices)
            if note_batch is not None:
                note_batch(index)
            if batch_start is not None:
                batch_start(batch, *indices)
            counts.start()
            # 3. Compute.
            output = evaluate(step, parts)
            counts.process()
            # 4. Let hooks and the caller see the output.
            if batch_end is not None:
                batch_end(output, batch, *indices)
            logs.end_batch()
            counts.complete()
            after(output)
            if state.received_sigterm and not progress.is_last_batch:
                self._end.in_evaluation()
            # All memory is free before the next batch is read.
            del output, batch, parts
        # A loader may have ended before its promised length.
        if index >= 0:
            progress.is_last_batch = final
        self._strategy.await_others(step)

    def _step(self, stage: str) -> EvaluationStep:
        word = STAGES[stage]
        # Predictions are the result, also where no hook reads them.
        wanted = stage == "predict" or self._hooks.reads_outputs(f"on_{word}_batch_end")
        forward_context = self._precision.forward_context
        return EvaluationStep(self._module, self._hooks, self._logs, f"{word}_step", forward_context, wanted=wanted)

    def _evaluator(self, stage: str) -> Callable[[Any, Sequence[Any]], Any]:
        """Return the function that evaluates a batch: the strategy's, with recovery if a callback decides about it."""
        if not self._hooks.recovers:
            return self._strategy.evaluate
        from equipoise.trainer.recovery.evaluation_recovery import EvaluationRecovery

        sizes = self._fitting_sizes[stage]
        return EvaluationRecovery(self._state, self._module, self._strategy, self._hooks, self._logs, sizes)
