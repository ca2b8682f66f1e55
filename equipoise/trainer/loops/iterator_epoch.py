"""The training epoch of a module that pulls its batches itself: `training_step(self, dataloader_iter)`.

    the hook or value                   what it refers to
    on_train_batch_start                the batch that an earlier step pulled last; None in the first step
    on_train_batch_end                  the batch that this step pulled last
    progress.batch, val_check_interval  steps, however many batches each of them pulls
    progress.pulled                     batches; a resumed run continues after them

The epoch ends with the step that pulls the last batch. A step that asks for one more is not completed: its
StopIteration ends the epoch.
"""

from typing import TYPE_CHECKING, Any

from torch.optim import LBFGS

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.self_log import CURRENT_HOOK
from equipoise.trainer.data.dataloader_iter import DataLoaderIter
from equipoise.trainer.loops.fit_state import FitState
from equipoise.trainer.loops.training_epoch import TrainingEpoch
from equipoise.trainer.runtime.iterator_preflight import accumulation_refused

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext

__all__ = ["IteratorEpoch"]


class IteratorEpoch(TrainingEpoch):
    """One epoch, or the rest of one. Its arguments are those of `TrainingEpoch`.

    Raises:
        ConfigurationError: If an optimiser or a callback needs what a step that pulls its batches cannot do.
    """

    def __init__(self, context: "RunContext", fit: FitState, **parts: Any) -> None:
        self._check(context, fit)
        super().__init__(context, fit, **parts)
        hooks = context.hooks
        stream = fit.data.open_stream
        self.logs = context.logs
        self.counts = fit.progress.batch.current
        self.pulled = fit.progress.pulled.current
        batches = context.batches(stream, "[_TrainingEpochLoop].train_dataloader_next", self.pulled.ready)
        self.iterator = DataLoaderIter(batches, stream, self.pulled)
        self.batch_start = hooks.bind("on_train_batch_start")
        self.batch_end = hooks.bind("on_train_batch_end")
        self.run_step = hooks.profiled(self.optimization, "run_training_batch")
        self.watch = self.loss_watch.bind()
        self.uses_outputs = hooks.uses_outputs()

    @staticmethod
    def _check(context: "RunContext", fit: FitState) -> None:
        """Check the result of `configure_optimizers`, and settings that callbacks may have changed since."""
        state = context.state
        module = context.module
        step = f"`{type(module).__name__}.training_step(dataloader_iter)`"
        # Averaging of weights sets a window, too, but goes through an epoch without gradients.
        if state.accumulate_grad_batches != 1 and not fit.skip_backward:
            raise accumulation_refused(step)
        uses_lbfgs = any(isinstance(optimizer, LBFGS) for optimizer in state.optimizers)
        if module.automatic_optimization and uses_lbfgs:
            raise ConfigurationError(
                f"LBFGS runs a step several times on the same batch, but {step} would pull other batches each time. Set"
                " `self.automatic_optimization = False` and call `optimizer.step(closure)` with a closure that keeps"
                " its batch, or take another optimiser."
            )

    def run(self) -> None:
        """Take step after step until no batch is left, or something else ends the epoch."""
        while not self.iterator.done:
            if self._take_step():
                return

    def _take_step(self) -> bool:
        counts = self.counts
        iterator = self.iterator
        # 1. Count the step, and let hooks see where it begins.
        index = counts.ready
        counts.make_ready()
        self.progress.batch.mark_last(False)
        self.logs.begin_batch(iterator)
        if self.batch_start is not None and self.batch_start(iterator.batch, iterator.batch_idx) == -1:
            self.skip_rest()
            return True
        counts.start()
        # 2. Compute it. The step pulls its batches meanwhile.
        last = (index + 1) % self.state.accumulate_grad_batches == 0
        try:
            result = self.run_step((iterator,), iterator.batch_idx, last)
        except StopIteration as error:
            self._leave_step(index, error)
            return True
        # 3. Count what it pulled, and step the schedulers.
        counts.process()
        self.pulled.set(self.pulled.ready)
        self.progress.batch.mark_last(iterator.done)
        ends = iterator.done or index + 1 == self.fit.data.end
        if self.watch is not None:
            self.watch(result, iterator.batch, iterator.batch_idx, last)
        if last:
            self.schedulers.after_batch(ends=ends, skipped=self.optimization.has_skipped)
        # 4. Let hooks, loggers and validation follow.
        outputs = self.optimization.outputs(result) if self.uses_outputs else {}
        # Its graph goes before hooks look at what is alive, and before the next batch is read.
        del result
        if self.batch_end is not None:
            self.batch_end(outputs, iterator.batch, iterator.batch_idx)
        self.logs.end_batch()
        counts.complete()
        return self.after_batch(index, last or ends, ends)

    def _leave_step(self, index: int, error: StopIteration) -> None:
        # The step did not return.
        vars(self.context.module)[CURRENT_HOOK] = None
        lost = self.iterator.end_pass("training_step", error, self.pulled.completed)
        self.logs.end_batch()
        self.progress.rewind()
        # More than were completed: this tells a resumed run that a step was left.
        self.pulled.make_ready(lost)
        self.progress.batch.mark_last(True)
        self.schedulers.end_batches()
        self.after_batch(index - 1, last=False, ends=True)
