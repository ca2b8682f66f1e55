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
        compare_replicas: Compares replicas; called after the first optimiser step of a run of several processes.
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
        compare_replicas: Callable[[], None],
    ) -> None:
        # A batch looks up nothing that is the same for the whole epoch.
        self._state = state
        self._fit = fit
        self._progress = fit.progress
        self._schedulers = schedulers
        self._compare_replicas = compare_replicas
        self._schedule = schedule
        self._stopping = schedule.stopping
        self._steps = schedule.stopping.steps
        self._logs = logger_output.logs
        self._log_metrics = hooks.wrapped(logger_output.log_metrics, "log_metrics")
        self._log_every = 1 if state.fast_dev_run else state.log_every_n_steps
        self._logs_steps = bool(state.loggers or state.metric_listeners) and self._log_every > 0
        self._validate = None if validate is None else hooks.wrapped(validate, "validation")
        # The list itself: callbacks may add to it.
        self._scheduled = state.lr_scheduler_configs

    def __call__(
        self, index: int, ends_window: bool, ends_epoch: bool, *, write: bool = True, validate: bool = True
    ) -> bool:
        """Do what is due.

        Args:
            index: The batch's index in the epoch.
            ends_window: Whether it is the last of an accumulation window.
            ends_epoch: Whether it is the last of the epoch.
            write: Whether values of the step go to the loggers and listeners. Default: True.
            validate: Whether validation may follow. Default: True.

        Returns:
            True if the epoch ends here.
        """
        state = self._state
        fit = self._fit
        progress = self._progress
        if fit.is_uneven or fit.awaits_step:
            self._agree(ends_window)
        # 1. Values of the step. Those of the last one before a stop are logged at any interval, as in Lightning.
        if ends_window and write and self._logs_steps:
            is_logged_step = (progress.batches_that_stepped + 1) % self._log_every == 0
            if is_logged_step or state.should_stop:
                self._log_metrics(self._logs.step_metrics())
        # 2. Validation, and the schedulers that may watch its values.
        if self._validate is not None and validate and self._schedule.is_due(index):
            self._validate(ends_window)
        if ends_window:
            if self._scheduled:
                self._schedulers.after_validation()
            progress.batches_that_stepped += 1
        # 3. Reasons to stop.
        done = ends_epoch or 0 <= state.max_steps <= self._steps.completed
        if state.should_stop:
            # A stop may end the program, so the loggers write out what they hold.
            for logger in state.loggers:
                logger.save()
            done = done or self._stopping.may_stop()
        if state.received_sigterm and not done:
            self._stopping.end_on_signal()
        return done

    def _agree(self, ends_window: bool) -> None:
        """Share requests to stop after an uneven step, and compare replicas after the first optimiser step."""
        fit = self._fit
        if fit.is_uneven:
            fit.is_uneven = False
            self._stopping.share_request()
        if fit.awaits_step and ends_window:
            fit.awaits_step = False
            self._compare_replicas()
