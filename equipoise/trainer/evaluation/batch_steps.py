"""The steps of an evaluation or a prediction over the batches of one loader, with their hooks and counters."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from equipoise.interop.lightning.classes import takes_iterator
from equipoise.interop.lightning.self_log import CURRENT_HOOK
from equipoise.trainer.data.batch_stream import BatchStream
from equipoise.trainer.data.dataloader_iter import DataLoaderIter
from equipoise.trainer.evaluation.evaluation_step import EvaluationStep, evaluator
from equipoise.trainer.runtime.signals import leave_evaluation
from equipoise.trainer.state.progress import BatchProgress, Counts

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext

__all__ = ["STAGES", "BatchSteps", "IteratorSteps", "run_steps"]

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


class IteratorSteps(BatchSteps):
    """Steps that pull their batches themselves: `validation_step(self, dataloader_iter)` and the like.

    As in training, the hooks before a step receive the batch that was pulled last, and those after it the last one
    that it has pulled. Counters count steps. A step that asks for more batches than its loader has is not completed:
    its StopIteration ends the loader. Lightning's prediction writers refuse such steps.
    """

    def run(self, after: Callable[[Any], None]) -> None:
        """Run them, and call a function with the output of each, after its hooks."""
        iterator = DataLoaderIter(self.batches, self.stream, Counts(), self.dataloader_idx)
        progress = self.progress
        counts = progress.current
        while not iterator.done:
            fetched = iterator.fetched
            counts.make_ready()
            progress.mark_last(False)
            self.context.logs.begin_batch(iterator, self.log_index)
            if self.batch_start is not None:
                self.batch_start(iterator.batch, iterator.batch_idx, *self.loader_index)
            counts.start()
            try:
                output = self.context.strategy.evaluate(self.step, (iterator,))
            except StopIteration as error:
                # The step did not return.
                vars(self.context.module)[CURRENT_HOOK] = None
                iterator.end_pass(self.name, error, fetched)
                self.context.logs.end_batch()
                progress.rewind()
                progress.mark_last(self.final)
                return
            counts.process()
            progress.mark_last(self.final and iterator.done)
            self.end_batch(output, iterator.batch, (iterator.batch_idx, *self.loader_index), after)
            # Its memory is free before the next step.
            del output


def run_steps(context: "RunContext", stage: str, *arguments: Any, after: Callable[[Any], None], **options: Any) -> None:
    """Run the steps over one loader, in the way that the module's step requires; see `BatchSteps`."""
    pulls_batches = takes_iterator(context.module, f"{STAGES[stage]}_step")
    steps_class = IteratorSteps if pulls_batches else BatchSteps
    steps_class(context, stage, *arguments, **options).run(after)
