"""Work that is due after a training batch: values to the loggers every `log_every_n_steps`, validation, the end.

Schedulers that watch a value step here as well, and reasons to stop are examined.
"""

from collections.abc import Callable

from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.logging.logger_output import LoggerOutput
from equipoise.trainer.loops.fit_state import FitState
from equipoise.trainer.loops.validation_schedule import ValidationSchedule
from equipoise.trainer.optimization.configuration.schedulers import Schedulers
from equipoise.trainer.state.run_state import RunState

__all__ = ["AfterBatch"]


class AfterBatch:
    """Does what is due after a batch, and returns whether the epoch ends there. One object serves one epoch.

    Args:
        state: The settings.
        hooks: The hooks.
        logger_output: Hands logged values to the loggers.
        fit: The state of training.
        schedulers: Step the learning-rate schedulers.
        schedule: Decides after which batches validation runs.
        validate: Validates; it receives whether an accumulation window has ended. None: this epoch has no validation.
        note_replicas: Called after the first optimiser step of a run of several processes.
    """

    def __init__(
        self,
        state: RunState,
        hooks: Hooks,
        logger_output: LoggerOutput,
        fit: FitState,
        schedulers: Schedulers,
        schedule: ValidationSchedule,
        *,
        validate: Callable[[bool], None] | None,
        note_replicas: Callable[[], None],
    ) -> None:
        self.logs = logger_output.logs
        self.fit = fit
        self.state = state
        self.progress = fit.progress
        self.schedulers = schedulers
        self.note_replicas = note_replicas
        self.validate = None if validate is None else hooks.wrapped(validate, "validation")
        self.log_metrics = hooks.wrapped(logger_output.log_metrics, "log_metrics")
        self.stopping = schedule.stopping
        self.schedule = schedule
        # The list itself: callbacks may add to it.
        self.scheduled = state.lr_scheduler_configs
        self.steps = schedule.stopping.steps
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
        if self.validate is not None and validate and self.schedule.is_due(index):
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
            self.stopping.end_on_signal()
        return done

    def _meet(self, last: bool) -> None:
        """Exchange what the processes exchange after a few batches alone."""
        if self.fit.is_uneven:
            self.fit.mark_uneven(False)
            self.stopping.share_request()
        if self.fit.awaits_step and last:
            self.fit.await_step(False)
            self.note_replicas()
