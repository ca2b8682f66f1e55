"""Work that is due after a training batch: values to the loggers every `log_every_n_steps`, validation, the end.

Schedulers that watch a value step here as well, and reasons to stop are examined.
"""

from collections.abc import Callable

from lightning.pytorch import LightningModule

from equipoise.parallel.communication.agreements import is_true_in_any
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.logging.logger_output import LoggerOutput
from equipoise.trainer.loops.fit_state import FitState
from equipoise.trainer.loops.validation_schedule import ValidationSchedule
from equipoise.trainer.optimization.configuration.schedulers import Schedulers
from equipoise.trainer.runtime.signals import EndOnSignal
from equipoise.trainer.state.run_state import RunState

__all__ = ["AfterBatch"]


class AfterBatch:
    """Does what is due after a batch, and returns whether the epoch ends there. One object serves one epoch."""

    def __init__(
        self,
        state: RunState,
        module: LightningModule,
        strategy: Strategy,
        hooks: Hooks,
        logger_output: LoggerOutput,
        fit: FitState,
        schedulers: Schedulers,
        schedule: ValidationSchedule,
        end: EndOnSignal,
        *,
        validates: bool,
        validate: Callable[[bool], None],
        note_replicas: Callable[[], None],
    ) -> None:
        self.strategy = strategy
        self.logs = logger_output.logs
        self.end = end
        self.fit = fit
        self.state = state
        self.progress = fit.progress
        self.schedulers = schedulers
        self.note_replicas = note_replicas
        self.validate = hooks.wrapped(validate, "validation")
        self.log_metrics = hooks.wrapped(logger_output.log_metrics, "log_metrics")
        self.stopping = schedule.stopping
        self.schedule = schedule
        self.validates = validates
        # The list itself: callbacks may add to it.
        self.scheduled = state.lr_scheduler_configs
        self.steps = fit.progress.steps(automatic=module.automatic_optimization)
        self.log_every = 1 if state.fast_dev_run else state.log_every_n_steps
        self.writes = bool(state.loggers or state.metric_listeners) and self.log_every > 0

    def __call__(self, index: int, last: bool, ends: bool, *, write: bool = True, validate: bool = True) -> bool:
        """Do what is due.

        Args:
            index: The batch's index in the epoch.
            last: Whether it ended an accumulation window.
            ends: Whether it is the epoch's last.
            write: Whether values of the step go to the loggers and listeners.
            validate: Whether validation may follow.

        Returns:
            True if the epoch ends here.
        """
        state = self.state
        progress = self.progress
        if self.fit.meets:
            self._meet(last)
        # 1. Values of the step.
        if last and write and self.writes:
            is_logged_step = (progress.batches_that_stepped + 1) % self.log_every == 0
            if is_logged_step or state.should_stop:
                self.log_metrics(self.logs.step_metrics())
        # 2. Validation, and the schedulers that may watch its values.
        if self.validates and validate and self.schedule.is_due(index):
            self.validate(last)
        if last:
            if self.scheduled:
                self.schedulers.after_validation()
            progress.batches_that_stepped += 1
        # 3. Reasons to stop.
        done = ends or 0 <= state.max_steps <= self.steps.completed
        if state.should_stop:
            for logger in state.loggers:
                logger.save()
            done = done or self.stopping.may_stop()
        if state.received_sigterm and not done:
            self.end.in_training()
        return done

    def _meet(self, last: bool) -> None:
        """Exchange what the processes exchange after a few batches alone."""
        if self.fit.is_uneven:
            self._share_request()
        if self.fit.awaits_step and last:
            self.fit.await_step(False)
            self.note_replicas()

    def _share_request(self) -> None:
        """Let all processes know if a hook of the batch, which only some of them called, has asked training to stop."""
        self.fit.mark_uneven(False)
        state = self.state
        if is_true_in_any(state.should_stop, self.strategy.processes) and not state.should_stop:
            state.should_stop = True
