"""The training epoch of a module that pulls its batches itself: `training_step(self, dataloader_iter)`.

    the hook or value                   what it refers to
    on_train_batch_start                the batch that an earlier step pulled last; None in the first step
    on_train_batch_end                  the batch that this step pulled last
    progress.batch, val_check_interval  steps, however many batches each of them pulls
    progress.pulled                     batches; a resumed run goes on behind them

The epoch ends with the step that pulls the last batch. A step that asks for one more is not completed: its
StopIteration ends the epoch.
"""

from typing import TYPE_CHECKING, Any

from torch.optim import LBFGS

from equipoise.errors import ConfigurationError, StepError
from equipoise.interop.lightning.classes import takes_iterator
from equipoise.interop.lightning.self_log import CURRENT_HOOK
from equipoise.notices import rank_zero_warn
from equipoise.trainer.data.dataloader_iter import DataLoaderIter
from equipoise.trainer.loops.after_batch import AfterBatch
from equipoise.trainer.runtime.iterator_preflight import accumulation_refused

if TYPE_CHECKING:
    from equipoise.trainer.loops.fit_loop import FitLoop

__all__ = ["run_epoch"]


def run_epoch(loop: "FitLoop") -> None:
    """Run the batches of an epoch, in the way that the module's training step asks for.

    Args:
        loop: The training loop.

    Raises:
        ConfigurationError: If an optimiser or a callback asks for what a step that pulls its batches cannot do.
    """
    if takes_iterator(loop.context.module, "training_step"):
        _IteratorEpoch(loop).run()
    else:
        loop.epoch()


class _IteratorEpoch:
    """One epoch, or the rest of one.

    Args:
        loop: The training loop.
    """

    def __init__(self, loop: "FitLoop") -> None:
        context = loop.context
        hooks = context.hooks
        assert loop.stream is not None
        self.loop = loop
        self.progress = loop.progress
        self.logs = context.logs
        self.counts = loop.progress.batch.current
        self.pulled = loop.progress.pulled.current
        self._check()
        batches = context.batches(loop.stream, "[_TrainingEpochLoop].train_dataloader_next", self.pulled.ready)
        self.iterator = DataLoaderIter(batches, loop.stream, self.pulled)
        self.batch_start = hooks.bind("on_train_batch_start")
        self.batch_end = hooks.bind("on_train_batch_end")
        self.optimize = loop.bind_optimization()
        self.run_step = hooks.profiled(self.optimize, "run_training_batch")
        self.watch = loop.loss_watch.bind() if loop.loss_watch is not None else None
        self.after_batch = AfterBatch(loop)
        self.uses_outputs = hooks.uses_outputs()

    def _check(self) -> None:
        """Check what `configure_optimizers` has returned, and what callbacks may have changed since."""
        trainer = self.loop.trainer
        module = self.loop.context.module
        step = f"`{type(module).__name__}.training_step(dataloader_iter)`"
        # Averaging of weights sets a window, too, but goes through an epoch without gradients.
        if trainer.accumulate_grad_batches != 1 and not self.loop.skip_backward:
            raise accumulation_refused(step)
        if module.automatic_optimization and any(isinstance(each, LBFGS) for each in trainer.optimizers):
            raise ConfigurationError(
                f"LBFGS runs a step several times on the same batch, but {step} would pull other batches each time. Set"
                " `self.automatic_optimization = False` and call `optimizer.step(closure)` with a closure that keeps"
                " its batch, or take another optimiser."
            )

    def run(self) -> None:
        """Take step after step until no batch is left, or something else ends the epoch."""
        if self.loop.trainer.should_stop and self.after_batch.may_stop():
            return
        while not self.iterator.done:
            if self._take_step():
                return

    def _take_step(self) -> bool:
        """Take one step, with all that belongs to it; return whether the epoch ends with it."""
        loop = self.loop
        counts = self.counts
        iterator = self.iterator
        # 1. Count the step, and let hooks see where it begins.
        index = counts.ready
        counts.ready = index + 1
        self.progress.batch.is_last_batch = False
        self.logs.begin_batch(iterator)
        if self.batch_start is not None and self.batch_start(iterator.batch, iterator.batch_idx) == -1:
            loop.skip_rest(index)
            return True
        counts.started = index + 1
        # 2. Compute it. The step pulls its batches meanwhile.
        last = (index + 1) % loop.trainer.accumulate_grad_batches == 0
        try:
            result = self._run_step(last)
        except StopIteration:
            self._leave_step(index)
            return True
        # 3. Count what it pulled, and step the schedulers.
        counts.processed = index + 1
        self.pulled.set(self.pulled.ready)
        self.progress.batch.is_last_batch = iterator.done
        ends = iterator.done or index + 1 == loop.max_batches
        if self.watch is not None:
            self.watch(result, iterator.batch, iterator.batch_idx, last)
        if last:
            loop.schedulers.after_batch(index, ends=ends)
        # 4. Let hooks, loggers and validation follow.
        outputs = self.optimize.outputs(result) if self.uses_outputs else {}
        del result  # its graph goes before others look at what is alive, and before the next batch comes
        if self.batch_end is not None:
            self.batch_end(outputs, iterator.batch, iterator.batch_idx)
        self.logs.end_batch()
        counts.completed = index + 1
        return self.after_batch(index, last or ends, ends)

    def _run_step(self, last: bool) -> Any:
        """Run the training step and what belongs to its optimisation.

        Args:
            last: Whether the optimiser steps.

        Raises:
            StopIteration: If the step asked for more batches than there are.
            StepError: If the step raised a StopIteration that has another cause.
        """
        try:
            return self.run_step((self.iterator,), self.iterator.batch_idx, last)
        except StopIteration as error:
            if self.iterator.is_overdrawn:
                raise
            raise StepError(
                "`training_step` raised StopIteration, though `dataloader_iter` was not asked for more batches than"
                " there are. Catch it in the step, or call `next(iterator, None)` of whatever iterator has ended."
            ) from error

    def _leave_step(self, index: int) -> None:
        """End the epoch after a step that asked for more batches than there are.

        Args:
            index: The index of the step.
        """
        vars(self.loop.context.module)[CURRENT_HOOK] = None  # the step did not return
        pulled = self.pulled.ready
        if lost := pulled - self.pulled.completed:
            rank_zero_warn(
                "`training_step` asked for more batches than the epoch has, so its last step was not completed;"
                f" {lost} of {pulled} batches were pulled in it. Call `next(dataloader_iter, None)` to train on what"
                " is left, or choose a number of batches that is a multiple of those of a step."
            )
        self.logs.end_batch()
        self.progress.rewind()
        self.pulled.ready = pulled  # more than were completed: this tells a resumed run that a step was left
        self.progress.batch.is_last_batch = True
        self.loop.schedulers.end_batches()
        self.after_batch(index - 1, last=False, ends=True, write=False)
