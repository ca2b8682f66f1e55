"""The times at which learning-rate schedulers step, in automatic optimisation."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.types import LRSchedulerConfig

from equipoise.errors import ConfigurationError
from equipoise.notices import rank_zero_warn

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext
    from equipoise.trainer.state.progress import Progress

__all__ = ["Schedulers"]


class Schedulers:
    """Step learning-rate schedulers when they are due, in automatic optimisation.

    Schedulers of a plateau watch a logged value, so they step after validation. All others step with the batches.

    Args:
        context: The run, whose state holds the configurations, which callbacks may exchange.
        progress: Counts the steps.
        awaits: Function that returns whether a validation that is still to come will log a new value of a name.
    """

    def __init__(self, context: "RunContext", progress: "Progress", awaits: Callable[[str], bool]) -> None:
        self._awaits = awaits
        self._state = context.state
        self._logs = context.logs
        self._processes = context.strategy.processes
        self._progress = progress
        self._is_automatic = context.module.automatic_optimization
        self._user_step = context.hooks.bind_module("lr_scheduler_step")

    def after_batch(self, index: int, *, ends: bool, skipped: bool = False) -> None:
        """Step the schedulers that watch no value, at the end of a window.

        Args:
            index: The number of the batch.
            ends: Whether it is the last batch of the epoch.
            skipped: Whether the optimiser has not stepped, because a scaler found gradients that are not finite.
                Default: False.
        """
        if self._state.lr_scheduler_configs:
            if not skipped:
                self._step("step", index, plateau=False)
            if ends:
                self.end_batches()

    def end_batches(self) -> None:
        """Step the schedulers of epochs that watch no value."""
        self._step("epoch", self._state.current_epoch, plateau=False)

    def after_validation(self, index: int) -> None:
        """Step the schedulers of batches that watch a value."""
        if self._state.lr_scheduler_configs:
            self._step("step", index, plateau=True)

    def after_epoch(self) -> None:
        """Step the schedulers of epochs that watch a value."""
        self._step("epoch", self._state.current_epoch, plateau=True)

    def _step(self, interval: str, index: int, *, plateau: bool) -> None:
        """Step the schedulers of an interval that are due."""
        if not self._is_automatic:
            return
        for config in self._state.lr_scheduler_configs:
            # 1. Whether the scheduler is due.
            if config.reduce_on_plateau != plateau or config.interval != interval:
                continue
            is_due = (index + 1) % config.frequency == 0
            if not is_due:
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
            self._progress.count()

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
        names = ", ".join(map(repr, metrics)) or "none"
        message = f"ReduceLROnPlateau watches {config.monitor!r}, which was never logged. Logged so far: {names}."
        if config.strict:
            raise ConfigurationError(
                f"{message} Log it, name another as 'monitor', or set 'strict': False to pass it over."
            )
        rank_zero_warn(f"{message} The learning rate stays as it is.", category=RuntimeWarning)
        return None
