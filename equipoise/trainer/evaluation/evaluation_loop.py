"""The validation and test loop: every batch once, without gradients."""

import math
from collections import ChainMap, defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from lightning.pytorch import LightningModule

from equipoise.interop.lightning.classes import is_overridden
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.data.batch_stream import BatchStream
from equipoise.trainer.data.loaders import Loaders
from equipoise.trainer.evaluation.batch_steps import STAGES, EvaluationSteps
from equipoise.trainer.evaluation.evaluation_step import Modes, check_dataloader_idx, without_gradients
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.logging.collection import Collection
from equipoise.trainer.logging.logger_output import LoggerOutput
from equipoise.trainer.logging.results_table import print_results
from equipoise.trainer.runtime.run_data import RunData
from equipoise.trainer.state.progress import BatchProgress
from equipoise.trainer.state.run_state import RunState
from equipoise.trainer.state.sent_state import LOCAL, RESULT, SentState

__all__ = ["EvaluationLoop"]


@dataclass(eq=False, repr=False)
class EvaluationLoop(SentState):
    """Evaluates a module on the loaders of a stage. Its state outlives a run.

    Args:
        state: The state of the trainer's runs.
        stage: "val" or "test".
        fitting: Whether it validates inside a fit. Default: it does not.

    Attributes:
        progress: Counts batches over all loaders.
        collection: Logged values.
        loaders: The loaders; None before they were requested.
        num_batches: Number of batches of each loader.
        has_run: Whether a batch was evaluated since the last start, the sanity check left out.
        loaded_at: The epoch in which the loaders were requested.
        resumed: The `loaders_state` of the run that this one resumes, until the loaders are requested.
    """

    state: RunState
    stage: Literal["val", "test"]
    fitting: bool = field(default=False, kw_only=True)
    progress: BatchProgress = field(init=False, metadata=RESULT)
    collection: Collection = field(init=False, metadata=RESULT)
    # Another process requests the loaders by itself.
    loaders: Loaders | None = field(default=None, init=False, metadata=LOCAL)
    num_batches: list[float] = field(default_factory=list, init=False, metadata=RESULT)
    has_run: bool = field(default=False, init=False, metadata=RESULT)
    loaded_at: float = field(default=-math.inf, init=False)
    resumed: dict[str, Any] | None = field(default=None, init=False)
    # The x-axis of values logged in steps, by loader; it continues over epochs.
    _steps_logged: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int), init=False)

    def __post_init__(self) -> None:
        if self.fitting:
            self.progress = self.state.progress.val_batch
        else:
            self.progress = BatchProgress()
        self.collection = Collection(training=False)

    @property
    def word(self) -> str:
        """The stage as in on_validation_start and test_step."""
        return STAGES[self.stage]

    # Data.

    def begin_run(
        self,
        module: LightningModule,
        strategy: Strategy,
        hooks: Hooks,
        logger_output: LoggerOutput,
        data: RunData,
        steps: EvaluationSteps,
    ) -> None:
        """Take the parts of a run, and forget the loaders of earlier ones."""
        self.module = module
        self.strategy = strategy
        self.hooks = hooks
        self.logger_output = logger_output
        self.logs = logger_output.logs
        self.data = data
        self.steps = steps
        self.forget_data()

    def forget_data(self) -> None:
        """Forget the loaders, so that they are requested anew."""
        self.loaders = None
        self.loaded_at = -math.inf
        self.resumed = None

    def load_data(self) -> None:
        """Request the loaders, at first and, in a fit, every `reload_dataloaders_every_n_epochs`."""
        state = self.state
        epoch = state.current_epoch
        is_reload_due = self.fitting and self._is_reload_due(epoch, self.loaded_at)
        if self.loaders is not None and not is_reload_due:
            return
        limit = getattr(state, f"limit_{self.stage}_batches")
        if limit == 0 or not is_overridden(f"{self.word}_step", self.module):
            return
        # A sanity check before an epoch without validation does not count as a request.
        if not state.sanity_checking or state.is_validation_epoch:
            self.loaded_at = epoch
        overfit = self.fitting and state.overfit_batches > 0
        self.loaders = self.data.request_loaders(self.stage, limit, overfit=overfit)
        self.num_batches = self.loaders.num_batches
        self._steps_logged.clear()
        self._restore_loaders(epoch)

    def _is_reload_due(self, epoch: int, loaded_at: float) -> bool:
        every = self.state.reload_dataloaders_every_n_epochs
        return every > 0 and epoch - loaded_at >= every

    def loaders_state(self) -> dict[str, Any]:
        """Return the state with which a resumed run continues to read the same loaders."""
        if self.loaders is None and self.resumed is not None:
            return self.resumed
        workers = []
        if self.loaders is not None:
            workers = self.loaders.workers.state_dict()
        steps_logged = [[index, count] for index, count in self._steps_logged.items()]
        return {"loaded_at": self.loaded_at, "workers": workers, "steps_logged": steps_logged}

    def _restore_loaders(self, epoch: int) -> None:
        """Continue to read the loaders of the resumed run, unless it would have requested new ones by now."""
        saved = self.resumed
        self.resumed = None
        if saved is None or self.loaders is None:
            return
        loaded_at = saved["loaded_at"]
        if self._is_reload_due(epoch, loaded_at):
            return
        self.loaded_at = loaded_at
        self.loaders.workers.load_state_dict(saved["workers"])
        self._steps_logged.update(saved["steps_logged"])

    @property
    def max_batches(self) -> list[float]:
        """Number of batches of each loader in the present run."""
        if not self.state.sanity_checking:
            return self.num_batches
        return [min(self.state.num_sanity_val_steps, batches) for batches in self.num_batches]

    def release(self) -> None:
        """End worker processes."""
        if self.loaders is not None:
            self.loaders.close()

    # A run.

    def run(self) -> list[dict[str, Any]]:
        """Evaluate, and return the logged values, a dictionary for each loader."""
        inference_mode = self.state.inference_mode and not self.fitting
        with without_gradients(inference_mode=inference_mode):
            self.load_data()
            if self.loaders is None:
                return []
            # Without a batch here, other processes may have one.
            is_alone = self.strategy.processes.world_size == 1
            if is_alone and sum(self.max_batches) == 0:
                return []
            with Modes(self.module) as modes:
                return self._run(self.loaders, modes)

    def _run(self, loaders: Loaders, modes: Modes) -> list[dict[str, Any]]:
        # 1. Open the loaders, and let hooks see the start.
        self.has_run = False
        self.progress.begin()
        streams = self._open(loaders)
        check_dataloader_idx(self.module, self.word, several=len(streams) > 1)
        self._start()
        # 2. Evaluate loader after loader.
        outputs: list[dict[str, Any]] = []
        count = len(streams)
        for index, stream in enumerate(streams):
            outputs.append(self._evaluate(stream, index, count))
            # A metric that the next loader logs, too, has a separate value for each loader.
            if index + 1 < count:
                self.collection.reset_metrics(index)
        # 3. Let hooks and loggers see the values, and restore the modes.
        outputs = self._finish(outputs)
        hook = f"on_{self.word}_model_train"
        if is_overridden(hook, self.module):
            self.hooks.call_module(hook)
        else:
            modes.restore(self.module)
        return outputs

    def _open(self, loaders: Loaders) -> list[BatchStream]:
        """Return the batches of each loader, of which the first has begun to be read."""
        loaders.set_epoch(self.state.progress.epoch.current.processed)
        most_batches: float = math.inf
        if self.state.sanity_checking:
            most_batches = self.state.num_sanity_val_steps
        streams = loaders.streams(most_batches)
        streams[0].start()
        return streams

    def _start(self) -> None:
        """Call the hooks of the start, with the same buffers in all processes."""
        hooks = self.hooks
        self.strategy.sync_buffers()
        hooks.call_module(f"on_{self.word}_model_eval")
        hooks.call(f"on_{self.word}_start")
        hooks.call(f"on_{self.word}_epoch_start")
        if hooks.copies_weights:
            # The buffers of averages differ between processes as those of the module did.
            self.strategy.sync_buffers()

    def _evaluate(self, stream: BatchStream, index: int, count: int) -> dict[str, Any]:
        """Evaluate on one of `count` loaders, and return its logged values."""
        logs = self.logs
        if self.state.sanity_checking:
            # It counts and logs nothing. Asking for the stage in each batch would take 2 µs.
            self.steps.run(self.stage, stream, self.progress, index, count, _ignore)
            logs.end_batches(show=False)
            return {}
        after_batch = partial(self._after_batch, index)
        self.steps.run(self.stage, stream, self.progress, index, count, after_batch)
        logs.end_batches(show=True)
        return logs.metrics()

    def _after_batch(self, dataloader_idx: int, output: Any) -> None:
        self.has_run = True
        if self.state.loggers and self.collection.any_on_step:
            step = self._steps_logged[dataloader_idx]
            self.logger_output.log_metrics(self.logs.metrics(), step=step)
        self._steps_logged[dataloader_idx] += 1

    def _finish(self, outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Call the hooks of the end, log the values, and return them for each loader."""
        hooks = self.hooks
        logs = self.logs
        sanity_checking = self.state.sanity_checking
        # Values logged in that hook belong to all loaders.
        logs.dataloader_idx = None
        hooks.call(f"on_{self.word}_epoch_end")
        logs.share_values()
        at_end: dict[str, Any] = {}
        if not sanity_checking:
            at_end = logs.metrics()
            logs.refresh()
            of_loaders = ChainMap(*outputs)
            self.logger_output.log_metrics({**of_loaders, **at_end})
        hooks.call(f"on_{self.word}_end")
        logs.reset()
        return [{**values, **at_end} for values in outputs]

    def print_results(self, outputs: list[dict[str, Any]]) -> None:
        """Print a table of the logged values of each loader."""
        print_results(outputs, "validate" if self.stage == "val" else "test")


def _ignore(output: Any) -> None:
    """Do nothing with the output of a batch."""
