"""The prediction loop: every batch once, outputs in the order of the data."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import BasePredictionWriter
from torch.utils.data import DataLoader

from equipoise.errors import ConfigurationError
from equipoise.interleave import interleave
from equipoise.interop.lightning.classes import is_a
from equipoise.interop.torch.loaders import with_sampler
from equipoise.notices import rank_zero_warn
from equipoise.trainer.data.batch_stream import BatchStream
from equipoise.trainer.data.loaders import Loaders
from equipoise.trainer.data.source_view import SourceView
from equipoise.trainer.loops.evaluation_step import (
    EvaluationStep,
    Modes,
    check_dataloader_idx,
    evaluator,
    without_gradients,
)
from equipoise.trainer.runtime.signals import leave_evaluation
from equipoise.trainer.state.progress import BatchProgress

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext
    from equipoise.trainer.trainer import Trainer

__all__ = ["PredictionLoop"]


class PredictionLoop:
    """Runs `predict_step` on the loaders; its state outlives a run.

    Args:
        trainer: The trainer.

    Attributes:
        progress: Counts batches over all loaders.
        predictions: The outputs, by loader and batch, on the CPU; those of the only loader where there is one.
        epoch_batch_indices: The indices of the samples in each batch, by loader; kept if a prediction writer asks for
            them.
        current_batch_indices: Those of the present batch.
    """

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer = trainer
        self.progress = BatchProgress()
        self.loaders: Loaders | None = None
        self.max_batches: list[float] = []
        self.return_predictions = True
        self.epoch_batch_indices: list[list[list[int]]] = []
        self.current_batch_indices: list[int] = []
        self._predictions: list[list[Any]] = []

    @property
    def predictions(self) -> list[Any]:
        """The outputs so far."""
        return self._predictions[0] if len(self._predictions) == 1 else self._predictions

    @property
    def batch_progress(self) -> BatchProgress:
        """The counter of batches, as Lightning's callbacks call it."""
        return self.progress

    @property
    def _data_source(self) -> SourceView:
        """The origin of the loaders, under the name by which Lightning's objects ask for it."""
        return self.trainer.source_of("predict")

    def forget_data(self) -> None:
        """The loaders will be asked for anew."""
        self.loaders = None

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what belongs to one run."""
        return {**vars(self), "loaders": None}

    def release(self) -> None:
        """Ends worker processes."""
        if self.loaders is not None:
            self.loaders.close()

    def run(self, context: "RunContext") -> list[Any] | None:
        """Predicts; returns the outputs unless `return_predictions=False`."""
        trainer = self.trainer
        if trainer.limit_predict_batches == 0:
            return None
        with without_gradients(inference_mode=trainer.inference_mode):
            self.loaders = context.request_loaders("predict", trainer.limit_predict_batches)
            if not self.loaders.sequential:
                raise ConfigurationError(
                    "`predict` reads several loaders one after the other: take CombinedLoader(mode='sequential')."
                )
            self.max_batches = self.loaders.num_batches
            with Modes(context.module) as modes:
                return self._run(context, self.loaders, modes)

    def _run(self, context: "RunContext", loaders: Loaders, modes: Modes) -> list[Any] | None:
        hooks, module, strategy = context.hooks, context.module, context.strategy
        writers = [c for c in hooks.callbacks if is_a(c, BasePredictionWriter)]
        self._keep = self.return_predictions or any(writer.interval.on_epoch for writer in writers)
        self.progress.begin()
        loaders.set_epoch(self.trainer.progress.epoch.current.processed)
        passes = [
            _RecordedPass(loader, limit, record=bool(writers))
            for loader, limit in zip(loaders.flat, self.max_batches, strict=True)
        ]
        several = len(passes) > 1
        check_dataloader_idx(
            module, ("predict_step", "on_predict_batch_start", "on_predict_batch_end"), several=several
        )
        self._predictions = [[] for _ in passes]
        self.epoch_batch_indices = [[] for _ in passes]
        context.strategy.begin_evaluation()
        hooks.call_module("on_predict_model_eval")
        hooks.call("on_predict_start")
        hooks.call("on_predict_epoch_start")
        for index, recorded in enumerate(passes):
            self._predict(context, recorded, index, several=several, final=index == len(passes) - 1)
        hooks.call("on_predict_epoch_end")
        if self.return_predictions:
            self._predictions = [
                interleave(strategy.processes.gather_objects(outputs)) for outputs in self._predictions
            ]
        results = self.predictions if self.return_predictions else None
        if not self.return_predictions:
            self._predictions = []
        self.epoch_batch_indices = []
        hooks.call("on_predict_end")
        modes.restore(module)
        return results

    def _predict(
        self, context: "RunContext", recorded: "_RecordedPass", dataloader_idx: int, *, several: bool, final: bool
    ) -> None:
        """Predicts the batches of one loader."""
        hooks, strategy, transfer = context.hooks, context.strategy, context.make_transfer(dataloader_idx)
        evaluate = evaluator(context, "predict")
        batch_start, batch_end = hooks.bind("on_predict_batch_start"), hooks.bind("on_predict_batch_end")
        step, counts, stream = EvaluationStep(context, "predict_step"), self.progress.current, recorded.stream
        which, index, cpu = (dataloader_idx,) if several else (), -1, torch.device("cpu")
        for batch in context.batches(stream, "[_PredictionLoop].predict_next"):
            index += 1
            self.progress.is_last_batch = final and index + 1 == stream.length
            parts = strategy.place(batch, transfer)
            batch = parts[0] if len(parts) == 1 else batch
            counts.ready += 1
            if recorded.record:
                self.current_batch_indices = recorded.indices(index)
                self.epoch_batch_indices[dataloader_idx].append(self.current_batch_indices)
            step.indices = indices = (index, *which)
            if batch_start is not None:
                batch_start(batch, *indices)
            counts.started += 1
            output = evaluate(step, parts)
            if output is None:
                rank_zero_warn("`predict_step` returned None. If that was on purpose, ignore this warning.")
            counts.processed += 1
            if batch_end is not None:
                batch_end(output, batch, *indices)
            counts.completed += 1
            if self._keep:
                self._predictions[dataloader_idx].append(move_data_to_device(output, cpu))
            del output, batch, parts
            if self.trainer.received_sigterm and not self.progress.is_last_batch:
                leave_evaluation(context)


class _RecordedPass:
    """A pass over a loader that remembers which samples each batch holds, for callbacks that write predictions.

    Args:
        loader: The loader.
        limit: The number of batches.
        record: Whether anybody wants to know.
    """

    def __init__(self, loader: Any, limit: float, *, record: bool) -> None:
        self.record = record and isinstance(loader, DataLoader) and loader.batch_sampler is not None
        self._seen: list[list[int]] = []
        if self.record:
            loader = with_sampler(loader, _Recorder(loader.batch_sampler, self._seen), batches=True)
        elif record:
            rank_zero_warn(f"Couldn't infer the batch indices fetched from your dataloader: `{type(loader).__name__}`")
        self.stream = BatchStream(loader, limit)

    def indices(self, batch_idx: int) -> list[int]:
        """The samples of a batch."""
        return self._seen[batch_idx]


class _Recorder:
    """A batch sampler that writes down what it gives."""

    def __init__(self, batch_sampler: Any, seen: list[list[int]]) -> None:
        self.batch_sampler, self.seen = batch_sampler, seen

    def __iter__(self) -> Iterator[Any]:
        self.seen.clear()
        for batch in self.batch_sampler:
            self.seen.append(list(batch))
            yield batch

    def __len__(self) -> int:
        return len(self.batch_sampler)
