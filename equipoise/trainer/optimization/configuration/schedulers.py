"""The times at which learning-rate schedulers step, in automatic optimisation."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import LRSchedulerConfig

from equipoise.errors import ConfigurationError
from equipoise.notices import rank_zero_warn
from equipoise.parallel.communication.processes import Processes
from equipoise.trainer.diagnostics.monitors import nothing_to_monitor
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.logging.logs import Logs
from equipoise.trainer.state.run_state import RunState

__all__ = ["Schedulers"]


class Schedulers:
    """Step learning-rate schedulers when they are due, in automatic optimisation.

    Schedulers of a plateau watch a logged value, so they step after validation. All others step with the batches.
    The frequency of those that step with the optimiser counts its steps in all epochs.

    Args:
        state: Holds the configurations, which callbacks may exchange, and the counters of the training.
        module: The user's module.
        processes: The processes of the run.
        hooks: The hooks.
        logs: The logged values.
        awaits: Function that returns whether a validation that is still to come will log a new value of a name.
    """

    def __init__(
        self,
        state: RunState,
        module: LightningModule,
        processes: Processes,
        hooks: Hooks,
        logs: Logs,
        awaits: Callable[[str], bool],
    ) -> None:
        self._awaits = awaits
        self._state = state
        self._logs = logs
        self._processes = processes
        self._progress = state.progress
        self._has_skipped = False
        self._is_automatic = module.automatic_optimization
        self._user_step = hooks.bind_module("lr_scheduler_step")

    def after_batch(self, *, ends: bool, skipped: bool = False) -> None:
        """Step the schedulers that watch no value, at the end of a window.

        Args:
            ends: Whether it is the last batch of the epoch.
            skipped: Whether the optimiser has not stepped, because a scaler found gradients that are not finite.
                Default: False.
        """
        if self._state.lr_scheduler_configs:
            self._has_skipped = skipped
            if skipped:
                self._progress.skipped_steps += 1
            self._step("step", plateau=False)
            if ends:
                self.end_batches()

    def end_batches(self) -> None:
        """Step the schedulers of epochs that watch no value."""
        self._step("epoch", plateau=False)

    def after_validation(self) -> None:
        """Step the schedulers of batches that watch a value."""
        if self._state.lr_scheduler_configs:
            self._step("step", plateau=True)

    def after_epoch(self) -> None:
        """Step the schedulers of epochs that watch a value."""
        self._step("epoch", plateau=True)

    def _step(self, interval: str, *, plateau: bool) -> None:
        """Step the schedulers of an interval that are due."""
        if not self._is_automatic or (interval == "step" and self._has_skipped):
            return
        count = self._state.current_epoch + 1
        if interval == "step":
            count = self._progress.optimizer_step.completed - self._progress.skipped_steps
        for config in self._state.lr_scheduler_configs:
            # 1. Whether the scheduler is due.
            if config.reduce_on_plateau != plateau or config.interval != interval:
                continue
            if count % config.frequency != 0:
                continue
            # 2. The value that it watches. Without one the learning rate stays as it is.
            watched = None
            if plateau:
                watched = self._watched(config)
                if watched is None:
                    continue
            # 3. The step.
            if self._user_step is not None:
                self._user_step(config.scheduler, watched)
            elif watched is None:
                config.scheduler.step()  # type: ignore[call-arg]
            else:
                config.scheduler.step(watched)
            self._progress.scheduler.count()

    def _watched(self, config: LRSchedulerConfig) -> Any:
        """Return the value that a scheduler watches; None if it is still to come, or is missing and may be."""
        name = config.monitor or ""
        metrics = self._logs.callback_metrics
        # Between two validations, schedulers of batches continue with the last value.
        needs_new_value = config.interval == "epoch" or name not in metrics
        if needs_new_value and self._awaits(name):
            return None
        value = metrics.get(name)
        # Each process has a value of its own of a step, but the learning rate must be the same.
        if self._processes.world_size > 1:
            value = self._processes.broadcast(value)
        if value is not None:
            return value
        error = nothing_to_monitor(type(config.scheduler).__name__, name, metrics)
        if config.strict:
            raise ConfigurationError(
                f"{error} Log it, name another as 'monitor', or set 'strict': False to pass it over."
            )
        rank_zero_warn(f"{error} The learning rate stays as it is.", category=RuntimeWarning)
        return None
