"""The prediction loop: every batch once, outputs in the order of the data."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import BasePredictionWriter

from equipoise.errors import ConfigurationError
from equipoise.interleave import interleave
from equipoise.interop.lightning.classes import is_a, takes_iterator
from equipoise.notices import rank_zero_warn
from equipoise.trainer.data.loaders import Loaders, Source
from equipoise.trainer.data.source_view import SourceView
from equipoise.trainer.evaluation.evaluation_step import (
    EvaluationStep,
    Modes,
    check_dataloader_idx,
    evaluator,
    without_gradients,
)
from equipoise.trainer.evaluation.recorded_batches import RecordedBatches
from equipoise.trainer.runtime.signals import leave_evaluation
from equipoise.trainer.state.progress import BatchProgress
from equipoise.trainer.state.run_state import RunState
from equipoise.trainer.state.sent_state import LOCAL, RESULT, SentState

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext

__all__ = ["PredictionLoop"]


@dataclass(eq=False, repr=False)
class PredictionLoop(SentState):
    """Runs `predict_step` on the loaders. Its state outlives a run.

    Args:
        state: The state of the trainer's runs.

    Attributes:
        progress: Counts batches over all loaders.
        predictions: The outputs, by loader and batch, on the CPU; those of the only loader if there is one.
        epoch_batch_indices: Indices of the samples in each batch, by loader; recorded if a prediction writer is among
            the callbacks.
        current_batch_indices: Those of the present batch.
    """

    state: RunState
    progress: BatchProgress = field(default_factory=BatchProgress, init=False, metadata=RESULT)
    # Another process requests the loaders by itself.
    loaders: Loaders | None = field(default=None, init=False, metadata=LOCAL)
    max_batches: list[float] = field(default_factory=list, init=False, metadata=RESULT)
    return_predictions: bool = field(default=True, init=False)
    epoch_batch_indices: list[list[list[int]]] = field(default_factory=list, init=False)
    current_batch_indices: list[int] = field(default_factory=list, init=False)
    _predictions: list[list[Any]] = field(default_factory=list, init=False)
    _source: Source | None = field(default=None, init=False, metadata=LOCAL)

    @property
    def predictions(self) -> list[Any]:
        """The outputs so far."""
        if len(self._predictions) == 1:
            return self._predictions[0]
        return self._predictions

    @property
    def batch_progress(self) -> BatchProgress:
        """The counter of batches, as Lightning's callbacks call it."""
        return self.progress

    @property
    def _data_source(self) -> SourceView:
        """The origin of the loaders, under the name by which Lightning's objects ask for it."""
        return SourceView(self._source)

    def begin_run(self, source: Source) -> None:
        """Forget the loaders of earlier runs.

        Args:
            source: Origin of the loaders in this run.
        """
        self.loaders = None
        self._source = source

    def release(self) -> None:
        """End worker processes."""
        if self.loaders is not None:
            self.loaders.close()

    def run(self, context: "RunContext") -> list[Any] | None:
        """Predict, and return the outputs unless `return_predictions=False`.

        Raises:
            ConfigurationError: If several loaders are to be read together.
        """
        state = self.state
        if state.limit_predict_batches == 0:
            return None
        with without_gradients(inference_mode=state.inference_mode):
            self.loaders = context.request_loaders("predict", state.limit_predict_batches)
            if not self.loaders.sequential:
                raise ConfigurationError(
                    "`predict` reads several loaders one after the other: take CombinedLoader(mode='sequential')."
                )
            self.max_batches = self.loaders.num_batches
            with Modes(context.module) as modes:
                return self._run(context, self.loaders, modes)

    def _run(self, context: "RunContext", loaders: Loaders, modes: Modes) -> list[Any] | None:
        hooks = context.hooks
        # 1. Open the loaders, and let hooks see the start.
        writers = [callback for callback in hooks.callbacks if is_a(callback, BasePredictionWriter)]
        keep_outputs = self.return_predictions or any(writer.interval.on_epoch for writer in writers)
        self.progress.begin()
        loaders.set_epoch(self.state.progress.epoch.current.processed)
        passes = []
        for loader, extent in zip(loaders.flat, loaders.extents, strict=True):
            passes.append(RecordedBatches(loader, extent, loaders.report_wrong_length, record=bool(writers)))
        several = len(passes) > 1
        check_dataloader_idx(context.module, "predict", several=several)
        self._predictions = [[] for _ in passes]
        self.epoch_batch_indices = [[] for _ in passes]
        context.strategy.sync_buffers()
        hooks.call_module("on_predict_model_eval")
        hooks.call("on_predict_start")
        hooks.call("on_predict_epoch_start")
        # 2. Predict loader after loader.
        predict = self._predict
        if takes_iterator(context.module, "predict_step"):
            predict = self._predict_pulled
        for index, recorded in enumerate(passes):
            outputs = self._predictions[index] if keep_outputs else None
            predict(context, recorded, index, outputs, several=several, final=index == len(passes) - 1)
        hooks.call("on_predict_epoch_end")
        # 3. Put the outputs of all processes together.
        results = self._gather_predictions(context)
        self.epoch_batch_indices = []
        hooks.call("on_predict_end")
        modes.restore(context.module)
        return results

    def _gather_predictions(self, context: "RunContext") -> list[Any] | None:
        """Return the outputs of all processes in the order of the data, if the user wants them."""
        if not self.return_predictions:
            self._predictions = []
            return None
        gather = context.strategy.processes.gather_objects
        self._predictions = [interleave(gather(outputs)) for outputs in self._predictions]
        return self.predictions

    def _predict(
        self,
        context: "RunContext",
        recorded: RecordedBatches,
        dataloader_idx: int,
        outputs: list[Any] | None,
        *,
        several: bool,
        final: bool,
    ) -> None:
        """Predict the batches of one loader.

        Args:
            context: The run.
            recorded: The pass over the loader.
            dataloader_idx: Index of the loader.
            outputs: List to which the output of each batch is appended; None if outputs are not kept.
            several: Whether there are several loaders.
            final: Whether this one is the last.
        """
        # Bound once for all batches.
        state = self.state
        hooks = context.hooks
        place = context.strategy.batch_to_devices
        transfer = context.make_transfer(dataloader_idx)
        evaluate = evaluator(context, "predict")
        batch_start = hooks.bind("on_predict_batch_start")
        batch_end = hooks.bind("on_predict_batch_end")
        step = EvaluationStep(context, "predict_step")
        progress = self.progress
        counts = progress.current
        stream = recorded.stream
        # The index of the loader is an argument of hooks only if there are several.
        loader_index: tuple[int, ...] = ()
        if several:
            loader_index = (dataloader_idx,)
        cpu = torch.device("cpu")
        index = -1
        for batch in context.batches(stream, "[_PredictionLoop].predict_next"):
            index += 1
            progress.mark_last(final and index + 1 == stream.length)
            # 1. Copy the batch to the devices, in parts.
            parts = place(batch, transfer)
            batch = parts[0] if len(parts) == 1 else batch
            counts.make_ready()
            if recorded.record:
                self.current_batch_indices = recorded.indices(index)
                self.epoch_batch_indices[dataloader_idx].append(self.current_batch_indices)
            indices = (index, *loader_index)
            step.begin_batch(*indices)
            if batch_start is not None:
                batch_start(batch, *indices)
            counts.start()
            # 2. Compute.
            output = evaluate(step, parts)
            _warn_of_none(output)
            counts.process()
            # 3. Hand the output on, and keep it on the CPU.
            if batch_end is not None:
                batch_end(output, batch, *indices)
            counts.complete()
            if outputs is not None:
                outputs.append(move_data_to_device(output, cpu))
            # Their memory is free before the next batch is read.
            del output, batch, parts
            if state.received_sigterm and not progress.is_last_batch:
                leave_evaluation(context)
        context.strategy.await_others(step)

    def _predict_pulled(
        self,
        context: "RunContext",
        recorded: RecordedBatches,
        dataloader_idx: int,
        outputs: list[Any] | None,
        *,
        several: bool,
        final: bool,
    ) -> None:
        """Predict the batches of one loader, which the step pulls by itself; see `_predict`."""
        from equipoise.trainer.evaluation.iterator_steps import IteratorSteps

        action = "[_PredictionLoop].predict_next"
        progress = self.progress
        steps = IteratorSteps(
            context, "predict", recorded.stream, action, progress, dataloader_idx, several=several, final=final
        )
        batch_end = context.hooks.bind("on_predict_batch_end")
        for output in steps:
            _warn_of_none(output)
            # Hand the output on, and keep it on the CPU. Lightning's prediction writers refuse such steps.
            if batch_end is not None:
                batch_end(output, steps.iterator.batch, *steps.indices)
            progress.current.complete()
            if outputs is not None:
                outputs.append(move_data_to_device(output, torch.device("cpu")))
            if self.state.received_sigterm and not progress.is_last_batch:
                leave_evaluation(context)


def _warn_of_none(output: Any) -> None:
    if output is None:
        rank_zero_warn("`predict_step` returned None. If that was on purpose, ignore this warning.")
