"""The validation and test loop: every batch once, without gradients."""

import math
from collections import ChainMap, defaultdict
from typing import TYPE_CHECKING, Any, Literal

from equipoise.interop.lightning.classes import is_overridden
from equipoise.trainer.data.batch_stream import BatchStream
from equipoise.trainer.data.loaders import Loaders
from equipoise.trainer.logging.collection import Collection
from equipoise.trainer.logging.results_table import print_results
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

__all__ = ["EvaluationLoop"]


class EvaluationLoop:
    """Evaluates a module on the loaders of a stage; its state outlives a run.

    Args:
        trainer: The trainer.
        stage: "val" or "test".
        fitting: Whether it validates inside a fit.

    Attributes:
        progress: Counts batches over all loaders.
        collection: What was logged.
        loaders: The loaders; None before they were asked for.
        num_batches: Batches of each loader.
        has_run: Whether a batch was evaluated since the last start, the sanity check left out.
        loaded_at: The epoch in which the loaders were asked for.
        resumed: What `loaders_state` returned in the run that this one resumes, until the loaders are there.
    """

    def __init__(self, trainer: "Trainer", stage: Literal["val", "test"], *, fitting: bool = False) -> None:
        self.trainer, self.stage, self.fitting = trainer, stage, fitting
        self.word = "validation" if stage == "val" else "test"  # as in on_validation_start, test_step
        self.progress = BatchProgress()
        self.collection = Collection(training=False)
        self.loaders: Loaders | None = None
        self.num_batches: list[float] = []
        self.has_run = False
        self._steps_logged: defaultdict[int, int] = defaultdict(
            int
        )  # the x-axis of step values: it goes on over epochs
        self.loaded_at: float = -math.inf
        self.resumed: dict[str, Any] | None = None

    # Data.

    def forget_data(self) -> None:
        """The loaders will be asked for anew."""
        self.loaders = None
        self.loaded_at = -math.inf
        self.resumed = None

    def load_data(self, context: "RunContext") -> None:
        """Asks for the loaders, at first and, in a fit, every `reload_dataloaders_every_n_epochs`."""
        trainer = self.trainer
        every, epoch = trainer.reload_dataloaders_every_n_epochs, trainer.current_epoch
        if self.loaders is not None and not (self.fitting and every and epoch - self.loaded_at >= every):
            return
        limit = trainer.limit_val_batches if self.stage == "val" else trainer.limit_test_batches
        if limit == 0 or not is_overridden(f"{self.word}_step", context.module):
            return
        if not trainer.sanity_checking or trainer.fit_loop_state.validates_in_epoch():
            self.loaded_at = epoch
        self.loaders = context.request_loaders(self.stage, limit, overfit=self.fitting and trainer.overfit_batches > 0)
        self.num_batches = self.loaders.num_batches
        self._steps_logged.clear()
        self._resume_loaders(epoch, every)

    def loaders_state(self) -> dict[str, Any]:
        """What a resumed run needs to read the same loaders on."""
        if self.loaders is None and self.resumed is not None:
            return self.resumed
        workers = self.loaders.workers.state_dict() if self.loaders is not None else []
        steps = [[index, count] for index, count in self._steps_logged.items()]
        return {"loaded_at": self.loaded_at, "workers": workers, "steps_logged": steps}

    def _resume_loaders(self, epoch: int, every: int) -> None:
        """Reads the loaders on as the run before did, unless that would have asked for new ones by now."""
        saved, self.resumed = self.resumed, None
        if saved is None or self.loaders is None or (every and epoch - saved["loaded_at"] >= every):
            return
        self.loaded_at = saved["loaded_at"]
        self.loaders.workers.load_state_dict(saved["workers"])
        self._steps_logged.update(dict(saved["steps_logged"]))

    @property
    def max_batches(self) -> list[float]:
        """Batches of each loader in the present run."""
        if not self.trainer.sanity_checking:
            return self.num_batches
        return [min(self.trainer.num_sanity_val_steps, batches) for batches in self.num_batches]

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what belongs to one run."""
        return {**vars(self), "loaders": None}

    def release(self) -> None:
        """Ends worker processes."""
        if self.loaders is not None:
            self.loaders.close()

    # A run.

    def run(self, context: "RunContext") -> list[dict[str, Any]]:
        """Evaluates and returns what was logged, a dictionary for each loader."""
        with without_gradients(inference_mode=self.trainer.inference_mode and not self.fitting):
            self.load_data(context)
            if self.loaders is None or (sum(self.max_batches) == 0 and context.strategy.processes.world_size == 1):
                return []
            with Modes(context.module) as modes:
                return self._run(context, self.loaders, modes)

    def _run(self, context: "RunContext", loaders: Loaders, modes: Modes) -> list[dict[str, Any]]:
        hooks, word, module = context.hooks, self.word, context.module
        self.has_run = False
        self.progress.begin()
        loaders.set_epoch(self.trainer.progress.epoch.current.processed)
        streams = loaders.streams(self.max_batches)
        streams[0].start()
        several = len(streams) > 1
        check_dataloader_idx(
            module, (f"{word}_step", f"on_{word}_batch_start", f"on_{word}_batch_end"), several=several
        )
        context.strategy.begin_evaluation()
        hooks.call_module(f"on_{word}_model_eval")
        hooks.call(f"on_{word}_start")
        hooks.call(f"on_{word}_epoch_start")
        outputs = []
        for index, stream in enumerate(streams):
            self._evaluate(context, stream, index, several=several, final=index == len(streams) - 1)
            context.logs.end_batches(show=not self.trainer.sanity_checking)
            outputs.append({} if self.trainer.sanity_checking else context.logs.metrics())
        outputs = self._finish(context, outputs)
        if is_overridden(f"on_{word}_model_train", module):
            hooks.call_module(f"on_{word}_model_train")
        else:
            modes.restore(module)
        return outputs

    def _evaluate(
        self, context: "RunContext", stream: BatchStream, dataloader_idx: int, *, several: bool, final: bool
    ) -> None:
        """Evaluates the batches of one loader."""
        hooks, logs, strategy, trainer, word = context.hooks, context.logs, context.strategy, self.trainer, self.word
        place, transfer = strategy.place, context.make_transfer(dataloader_idx)
        evaluate = evaluator(context, self.stage)
        batch_start, batch_end = hooks.bind(f"on_{word}_batch_start"), hooks.bind(f"on_{word}_batch_end")
        step = EvaluationStep(context, f"{word}_step", wanted=hooks.reads_outputs(f"on_{word}_batch_end"))
        progress, counts = self.progress, self.progress.current
        which, log_idx = ((dataloader_idx,), dataloader_idx) if several else ((), None)
        sanity, index = trainer.sanity_checking, -1
        for batch in context.batches(stream, f"[_EvaluationLoop].{self.stage}_next"):
            index += 1
            progress.is_last_batch = final and index + 1 == stream.length
            parts = place(batch, transfer)
            batch = parts[0] if len(parts) == 1 else batch
            counts.ready += 1
            logs.begin_batch(batch, log_idx)
            step.indices = indices = (index, *which)
            if batch_start is not None:
                batch_start(batch, *indices)
            counts.started += 1
            output = evaluate(step, parts)
            counts.processed += 1
            if batch_end is not None:
                batch_end(output, batch, *indices)
            del output, batch, parts
            logs.end_batch()
            counts.completed += 1
            if not sanity:
                self._after_batch(context, dataloader_idx)
            if trainer.received_sigterm and not progress.is_last_batch:
                leave_evaluation(context)

    def _after_batch(self, context: "RunContext", dataloader_idx: int) -> None:
        self.has_run = True
        if self.trainer.loggers and self.collection.any_on_step:
            self.trainer.log_metrics(context.logs.metrics(), step=self._steps_logged[dataloader_idx])
        self._steps_logged[dataloader_idx] += 1

    def _finish(self, context: "RunContext", outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Fires the closing hooks, hands the values on, and returns them for each loader."""
        hooks, logs, trainer = context.hooks, context.logs, self.trainer
        logs.leave_loaders()
        hooks.call(f"on_{self.word}_epoch_end")
        at_end = {} if trainer.sanity_checking else logs.metrics()
        together = {**ChainMap(*outputs), **at_end}
        outputs = [{**values, **at_end} for values in outputs]
        if not trainer.sanity_checking:
            logs.refresh()
            trainer.log_metrics(together)
        hooks.call(f"on_{self.word}_end")
        logs.reset()
        return outputs

    def print_results(self, outputs: list[dict[str, Any]]) -> None:
        """Prints a table of what was logged."""
        if self.trainer.is_global_zero:
            print_results(outputs, "validate" if self.stage == "val" else "test")
