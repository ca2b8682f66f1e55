"""The prediction loop: every batch once, outputs in the order of the data."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter

from equipoise.errors import ConfigurationError
from equipoise.interleave import interleave
from equipoise.interop.lightning.classes import is_a
from equipoise.notices import rank_zero_warn
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.data.loaders import Loaders, Source
from equipoise.trainer.evaluation.batch_steps import EvaluationSteps
from equipoise.trainer.evaluation.evaluation_step import Modes, check_dataloader_idx, without_gradients
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.runtime.run_data import RunData
from equipoise.trainer.state.progress import BatchProgress
from equipoise.trainer.state.run_state import RunState
from equipoise.trainer.state.sent_state import LOCAL, RESULT, SentState

__all__ = ["PredictionLoop"]


@dataclass(eq=False, repr=False)
class PredictionLoop(SentState):
    """Runs `predict_step` on the loaders. Its state outlives a run.

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
    _source: Source = field(default_factory=lambda: Source("predict"), init=False, metadata=LOCAL)

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
    def _data_source(self) -> Source:
        """The origin of the loaders, under the name by which Lightning's objects ask for it."""
        return self._source

    def begin_run(
        self, module: LightningModule, strategy: Strategy, hooks: Hooks, data: RunData, steps: EvaluationSteps
    ) -> None:
        """Take the parts of a run, and forget the loaders of earlier ones."""
        self.module = module
        self.strategy = strategy
        self.hooks = hooks
        self.data = data
        self.steps = steps
        self.loaders = None
        self._source = data.sources["predict"]

    def release(self) -> None:
        """End worker processes."""
        if self.loaders is not None:
            self.loaders.close()

    def run(self) -> list[Any] | None:
        """Predict, and return the outputs unless `return_predictions=False`.

        Raises:
            ConfigurationError: If several loaders are to be read together.
        """
        state = self.state
        if state.limit_predict_batches == 0:
            return None
        with without_gradients(inference_mode=state.inference_mode):
            self.loaders = self.data.request_loaders("predict", state.limit_predict_batches)
            if not self.loaders.sequential:
                raise ConfigurationError(
                    "`predict` reads several loaders one after the other: take CombinedLoader(mode='sequential')."
                )
            self.max_batches = self.loaders.num_batches
            with Modes(self.module) as modes:
                return self._run(self.loaders, modes)

    def _run(self, loaders: Loaders, modes: Modes) -> list[Any] | None:
        hooks = self.hooks
        # 1. Open the loaders, and let hooks see the start.
        writers = [callback for callback in hooks.callbacks if is_a(callback, BasePredictionWriter)]
        keep_outputs = self.return_predictions or any(writer.interval.on_epoch for writer in writers)
        self.progress.begin()
        loaders.set_epoch(self.state.progress.epoch.current.processed)
        streams = loaders.streams()
        count = len(streams)
        check_dataloader_idx(self.module, "predict", several=count > 1)
        self._predictions = [[] for _ in streams]
        self.epoch_batch_indices = [[] for _ in streams]
        self.strategy.sync_buffers()
        hooks.call_module("on_predict_model_eval")
        hooks.call("on_predict_start")
        hooks.call("on_predict_epoch_start")
        # 2. Predict loader after loader.
        for index, stream in enumerate(streams):
            note_batch = None
            if writers and stream.record_indices():
                note_batch = partial(self._note_indices, stream.indices, self.epoch_batch_indices[index])
            after = partial(_keep, self._predictions[index] if keep_outputs else None)
            self.steps.run("predict", stream, self.progress, index, count, after, note_batch=note_batch)
        hooks.call("on_predict_epoch_end")
        # 3. Put the outputs of all processes together.
        results = self._gather_predictions()
        self.epoch_batch_indices = []
        hooks.call("on_predict_end")
        modes.restore(self.module)
        return results

    def _gather_predictions(self) -> list[Any] | None:
        """Return the outputs of all processes in the order of the data, if the user wants them."""
        if not self.return_predictions:
            self._predictions = []
            return None
        gather = self.strategy.processes.data.gather_objects
        self._predictions = [interleave(gather(outputs)) for outputs in self._predictions]
        return self.predictions

    def _note_indices(self, indices: list[list[int]], of_loader: list[list[int]], batch_idx: int) -> None:
        """Note the indices of a batch's samples, before its hooks."""
        self.current_batch_indices = indices[batch_idx]
        of_loader.append(self.current_batch_indices)


def _keep(outputs: list[Any] | None, output: Any) -> None:
    """Keep the output of a batch on the CPU, if outputs are kept."""
    if output is None:
        rank_zero_warn("`predict_step` returned None. If that was on purpose, ignore this warning.")
    if outputs is not None:
        outputs.append(move_data_to_device(output, torch.device("cpu")))
