"""The loop over the batches of a training epoch."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from equipoise.strategies.strategy import Strategy
from equipoise.trainer.diagnostics.loss_watch import LossWatch
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.logging.logs import Logs
from equipoise.trainer.loops.after_batch import AfterBatch
from equipoise.trainer.loops.fit_state import FitState
from equipoise.trainer.optimization.automatic import AutomaticOptimization
from equipoise.trainer.optimization.configuration.schedulers import Schedulers
from equipoise.trainer.runtime.run_data import RunData
from equipoise.trainer.state.run_state import RunState

if TYPE_CHECKING:
    from equipoise.trainer.optimization.manual import ManualOptimization

__all__ = ["TrainingEpoch"]


class TrainingEpoch:
    """One epoch, or the rest of one. Everything is bound anew, since callbacks change settings between epochs.

    Args:
        state: The settings.
        strategy: The strategy.
        hooks: The hooks.
        logs: The logged values.
        data: The data of the run.
        fit: The state of training, its stream open.
        schedulers: Step the learning-rate schedulers.
        optimization: Takes the steps.
        loss_watch: Reports a loss that is not finite.
        after_batch: Does what is due after a batch, and returns whether the epoch ends there.
    """

    def __init__(
        self,
        state: RunState,
        strategy: Strategy,
        hooks: Hooks,
        logs: Logs,
        data: RunData,
        fit: FitState,
        *,
        schedulers: Schedulers,
        optimization: "AutomaticOptimization | ManualOptimization",
        loss_watch: LossWatch,
        after_batch: AfterBatch,
    ) -> None:
        self.state = state
        self.strategy = strategy
        self.hooks = hooks
        self.logs = logs
        self.data = data
        self.fit = fit
        self.progress = fit.progress
        self.schedulers = schedulers
        self.optimization = optimization
        self.loss_watch = loss_watch
        self.after_batch = after_batch
        # Called in place of on_train_batch_end where only other processes have a batch.
        self._idle_end = hooks.bind_deciders("on_train_batch_end")

    def run(self) -> None:
        """Run the batches."""
        # Bound once for all batches: a step looks nothing up by name.
        hooks = self.hooks
        logs = self.logs
        progress = self.progress.batch
        counts = progress.current
        window = self.state.accumulate_grad_batches
        place = self.strategy.batch_to_devices
        transfer = self.data.make_transfer()
        skips = self._bind_start()
        batch_end = hooks.bind("on_train_batch_end")
        before_transfer = hooks.bind("on_before_batch_to_device")
        after_batch = self.after_batch
        watch = self.loss_watch.bind(self.optimization.step)
        read_outputs = self.optimization.outputs if hooks.uses_outputs() else None
        # The list itself: callbacks may add to it.
        scheduled = self.state.lr_scheduler_configs
        run_batch = hooks.profiled(self.optimization, "run_training_batch")
        index = counts.ready - 1
        data = self.fit.data
        stream = data.open_stream
        drawn = stream.counts.of
        for batch in self.data.batches(stream, "[_TrainingEpochLoop].train_dataloader_next", index + 1):
            # 1. Count the batch, and copy it to the devices, in parts.
            index += 1
            progress.reach(index, stream.length)
            if before_transfer is not None:
                before_transfer(index)
            parts = place(batch, transfer)
            # If only other processes have a batch, nearly no hook is called here; all else happens.
            has_batch = len(parts) > 0
            batch = parts[0] if len(parts) == 1 else batch
            logs.begin_batch(batch, None, drawn(index))
            if skips is not None and skips(batch, index, has_batch):
                self.skip_rest()
                return
            counts.started = index + 1
            # 2. Compute, and step the optimiser at the end of a window.
            ends_epoch = progress.is_last_batch or index + 1 == data.end
            ends_window = ends_epoch or (index + 1) % window == 0
            result = run_batch(parts, index, ends_window)
            counts.processed = index + 1
            if watch is not None and has_batch:
                watch(result, batch, index, ends_window)
            # 3. Step the schedulers.
            if ends_window and scheduled:
                self.schedulers.after_batch(ends=ends_epoch, skipped=self.optimization.has_skipped)
            # 4. Let hooks see the outputs. The graph goes before they look at what is alive.
            outputs = read_outputs(result) if read_outputs is not None and has_batch else {}
            del result
            if batch_end is not None and has_batch:
                batch_end(outputs, batch, index)
            elif not has_batch:
                self._end_without_batch(index)
            del outputs, batch, parts
            # 5. Logs, validation, reasons to stop.
            logs.end_batch()
            counts.complete()
            if after_batch(index, ends_window, ends_epoch):
                return
        self._end_early(index)

    def _bind_start(self) -> Callable[[Any, int, bool], bool] | None:
        """Bind `on_train_batch_start` so that it returns whether the rest of the epoch is skipped; None if never."""
        fit = self.fit
        hook = self.hooks.bind("on_train_batch_start")
        if hook is None and not fit.data.together:
            return None
        from equipoise.parallel.communication.agreements import is_true_in_any

        stream = fit.data.open_stream
        processes = self.strategy.processes

        def skips(batch: Any, index: int, has_batch: bool) -> bool:
            skipped = hook is not None and has_batch and hook(batch, index) == -1
            if index < stream.even_steps:
                return skipped
            # A process without a batch calls no hook, so it learns from the others that the epoch ends.
            skipped = is_true_in_any(skipped, processes)
            fit.is_uneven = not skipped
            # Where the first step is the only one, buffers are compared if all processes have trained in it.
            if index == 0 and not is_true_in_any(not has_batch, processes):
                stream.even_steps = 1
            return skipped

        return skips

    def _end_early(self, index: int) -> None:
        """Complete an epoch whose batches ended before their promised number."""
        progress = self.progress.batch
        if index < 0:
            self.fit.data.check_not_empty(self.state.max_epochs)
            return
        if progress.is_last_batch:
            return
        progress.is_last_batch = True
        self.fit.has_ended_early = True
        # 1. The window that was left open.
        is_open = (index + 1) % self.state.accumulate_grad_batches != 0
        if is_open:
            # A checkpoint of the step belongs to a batch that is not completed.
            progress.current.reopen()
            self.optimization.end_window(index)
            self.schedulers.after_batch(ends=True, skipped=self.optimization.has_skipped)
            if self._idle_end is not None:
                self._idle_end({}, None, index)
            progress.current.complete()
        else:
            self.schedulers.end_batches()
        # 2. Logs, and validation if it follows the epoch's last batch.
        self.after_batch(index, is_open, ends_epoch=True, write=is_open)

    def _end_without_batch(self, index: int) -> None:
        self.logs.forget_steps()
        if self._idle_end is not None:
            self._idle_end({}, None, index)

    def skip_rest(self) -> None:
        """End the epoch before a batch for which `on_train_batch_start` returned -1."""
        self.progress.batch.is_last_batch = True
        self.progress.batch.current.process()
        self.schedulers.end_batches()
