"""Work after a training batch: logs, validation, schedulers that watch a value, reasons to stop."""

import math
import time
from typing import TYPE_CHECKING

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.interop.lightning.classes import takes_iterator
from equipoise.trainer.runtime.signals import leave_training

if TYPE_CHECKING:
    from equipoise.trainer.loops.fit_loop import FitLoop

__all__ = ["AfterBatch"]


class AfterBatch:
    """Made for an epoch, called after each of its batches; says whether the epoch ends there.

    Args:
        loop: The training loop.
    """

    def __init__(self, loop: "FitLoop") -> None:
        self.loop, self.trainer, self.progress = loop, loop.trainer, loop.progress
        self.logs, self.schedulers = loop.context.logs, loop.schedulers
        self.scheduled = loop.trainer.lr_scheduler_configs
        self.steps = loop.progress.steps(automatic=loop.context.module.automatic_optimization)
        trainer = loop.trainer
        self.log_every = 1 if trainer.fast_dev_run else trainer.log_every_n_steps
        self.writes = bool(trainer.loggers or trainer.metric_listeners) and self.log_every > 0
        self.validates = loop.validates_in_epoch()
        self.pulls = takes_iterator(loop.context.module, "training_step")  # then steps are fewer than batches

    def __call__(self, index: int, last: bool, ends: bool, *, write: bool = True, validate: bool = True) -> bool:
        """Does what is due.

        Args:
            index: The batch's index.
            last: Whether it ended an accumulation window.
            ends: Whether it is the epoch's last.
            write: Whether values of the step go to the loggers and listeners.
            validate: Whether validation may follow.
        """
        trainer, progress = self.trainer, self.progress
        if (
            last
            and write
            and self.writes
            and ((progress.batches_that_stepped + 1) % self.log_every == 0 or trainer.should_stop)
        ):
            trainer.log_metrics(self.logs.step_metrics())
        if self.validates and validate and self.validation_due(index):
            self.loop.validate(window_ended=last)
        if last:
            if self.scheduled:
                self.schedulers.after_validation(index)
            progress.batches_that_stepped += 1
        done = ends or 0 <= trainer.max_steps <= self.steps.completed
        if trainer.should_stop:
            for logger in trainer.loggers:
                logger.save()
            done = done or self.may_stop()
        if trainer.received_sigterm and not done:
            leave_training(self.loop.context)
        return done

    def validation_due(self, index: int) -> bool:
        """Whether validation follows this batch."""
        trainer, loop = self.trainer, self.loop
        every, is_last = loop.val_check_batch, self.progress.batch.is_last_batch
        if is_last and (self.pulls or (every is not None and math.isinf(every))):
            return True
        if trainer.should_stop and loop.can_stop_early():
            return True  # early stopping wants to know how the model is now
        if every is None:
            assert trainer.val_check_seconds is not None
            due = time.monotonic() - loop.last_validation >= trainer.val_check_seconds
            return loop.context.strategy.processes.broadcast(due)
        if math.isinf(every):
            limit = trainer.limit_train_batches
            return (index + 1) % limit == 0 if isinstance(limit, int) else is_last
        counted = self.progress.batch.total.ready if trainer.check_val_every_n_epoch is None else index + 1
        return counted % int(every) == 0

    def may_stop(self) -> bool:
        """Whether training may end now that somebody asked for it; says once why not."""
        loop, trainer = self.loop, self.trainer
        if loop.can_stop_early():
            return True
        if not loop.told_to_wait:
            loop.told_to_wait = True
            rank_zero_info(
                f"The Trainer was asked to stop, but min_epochs={trainer.min_epochs} or"
                f" min_steps={trainer.min_steps} is not met yet: it goes on."
            )
        return False
