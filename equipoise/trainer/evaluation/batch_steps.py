"""The steps of an evaluation or a prediction over the batches of one loader, with their hooks and counters."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from equipoise.trainer.data.batch_stream import BatchStream
from equipoise.trainer.evaluation.evaluation_step import EvaluationStep, evaluator
from equipoise.trainer.runtime.signals import leave_evaluation
from equipoise.trainer.state.progress import BatchProgress

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext

__all__ = ["STAGES", "BatchSteps"]

# Stages as in on_validation_start and predict_step.
STAGES = {"val": "validation", "test": "test", "predict": "predict"}


class BatchSteps:
    """The steps over one loader.

    Args:
        context: The run.
        stage: "val", "test" or "predict".
        stream: The pass over the loader.
        progress: Counts the steps over all loaders.
        dataloader_idx: Index of the loader.
        num_loaders: Number of loaders.
        note_batch: Called with the index of each batch before its hooks. Default: None, nothing is.
    """

    def __init__(
        self,
        context: "RunContext",
        stage: str,
        stream: BatchStream,
        progress: BatchProgress,
        dataloader_idx: int,
        num_loaders: int,
        *,
        note_batch: Callable[[int], None] | None = None,
    ) -> None:
        word = STAGES[stage]
        hooks = context.hooks
        self.context = context
        self.stage = stage
        self.stream = stream
        self.progress = progress
        self.dataloader_idx = dataloader_idx
        self.final = dataloader_idx == num_loaders - 1
        self.note_batch = note_batch
        self.batch_start = hooks.bind(f"on_{word}_batch_start")
        self.batch_end = hooks.bind(f"on_{word}_batch_end")
        self.name = f"{word}_step"
        loop = "Evaluation"
        is_read = hooks.reads_outputs(f"on_{word}_batch_end")
        if stage == "predict":
            loop = "Prediction"
            # Predictions are the result, also where no hook reads them.
            is_read = True
        self.step = EvaluationStep(context, self.name, wanted=is_read)
        self.batches = context.batches(stream, f"[_{loop}Loop].{stage}_next")
        # The index of the loader is an argument of hooks, and a part of names, only if there are several.
        self.loader_index: tuple[int, ...] = ()
        self.log_index: int | None = None
        if num_loaders > 1:
            self.loader_index = (dataloader_idx,)
            self.log_index = dataloader_idx

    def run(self, after: Callable[[Any], None]) -> None:
        """Run them, and call a function with the output of each, after its hooks."""
        # Bound once for all batches.
        context = self.context
        logs = context.logs
        note_batch = self.note_batch
        batch_start = self.batch_start
        stream = self.stream
        drawn = stream.counts.of
        progress = self.progress
        counts = progress.current
        step = self.step
        place = context.strategy.batch_to_devices
        transfer = context.make_transfer(self.dataloader_idx)
        evaluate = evaluator(context, self.stage)
        index = -1
        for batch in self.batches:
            index += 1
            progress.mark_last(self.final and index + 1 == stream.length)
            # 1. Copy the batch to the devices, in parts.
            parts = place(batch, transfer)
            batch = parts[0] if len(parts) == 1 else batch
            counts.make_ready()
            logs.begin_batch(batch, self.log_index, drawn(index))
            indices = (index, *self.loader_index)
            step.begin_batch(*indices)
            if note_batch is not None:
                note_batch(index)
            if batch_start is not None:
                batch_start(batch, *indices)
            counts.start()
            # 2. Compute.
            output = evaluate(step, parts)
            counts.process()
            # 3. Let hooks and the caller see the output. All memory is free before the next batch is read.
            self.end_batch(output, batch, indices, after)
            del output, batch, parts
        # A loader may have ended before its promised length.
        if index >= 0:
            progress.mark_last(self.final)
        context.strategy.await_others(step)

    def end_batch(self, output: Any, batch: Any, indices: tuple[int, ...], after: Callable[[Any], None]) -> None:
        """Call the hook of a batch's end and the caller's function, and leave the evaluation if a signal came."""
        if self.batch_end is not None:
            self.batch_end(output, batch, *indices)
        self.context.logs.end_batch()
        self.progress.current.complete()
        after(output)
        if self.context.state.received_sigterm and not self.progress.is_last_batch:
            leave_evaluation(self.context)
