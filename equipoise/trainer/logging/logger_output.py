"""Hand logged values to loggers, and to callbacks that draw them; `loops/after_batch.py` decides when."""

from collections.abc import Sequence
from typing import Any

from equipoise.trainer.logging.logs import Logs
from equipoise.trainer.logging.results_table import to_scalars
from equipoise.trainer.state.run_state import MetricListener, RunState

__all__ = ["LoggerOutput"]


class LoggerOutput:
    """Output of logged values to loggers and listeners.

    A listener is called with the trainer, the values by name, and the number of optimiser steps before the present
    one. Values are read from their devices once for loggers and listeners together. As the values of a step may be
    synchronised between processes, all processes must have listeners, or none.

    Args:
        state: Contains the loggers and the listeners.
        logs: The logged values.
        trainer: The first argument of listeners.

    Attributes:
        logs: The logged values.
    """

    def __init__(self, state: RunState, logs: Logs, trainer: object) -> None:
        self._state = state
        self.logs = logs
        self._trainer = trainer
        # Epoch and step of the checkpoint that is evaluated.
        self._evaluated: tuple[int, int] | None = None

    def evaluate_checkpoint(self, epoch: int, step: int) -> None:
        """Note that the run evaluates the weights of a checkpoint, at whose step its values stand.

        Args:
            epoch: Number of the epoch in which the checkpoint was written.
            step: Number of optimiser steps before.
        """
        self._evaluated = (epoch, step)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Pass values to the loggers, and to the listeners unless a step is passed.

        Args:
            metrics: Values by name.
            step: Their position on the x-axis, which may count something else than optimiser steps. Default: None, the
                value named "step" if there is one, else the number of optimiser steps.
        """
        if not metrics:
            return
        # 1. The values are read once for all.
        state = self._state
        listeners: Sequence[MetricListener] = ()
        if step is None:
            listeners = state.metric_listeners
        if not state.loggers and not listeners:
            return
        scalars = to_scalars(metrics)
        # 2. Listeners.
        for listen in listeners:
            listen(self._trainer, scalars, state.progress.batches_that_stepped)
        # 3. Loggers.
        if not state.loggers:
            return
        self.logs.logged_metrics.update(metrics)
        if step is None:
            step = self._pop_step(scalars)
        for logger in state.loggers:
            logger.log_metrics(metrics=scalars, step=int(step))
            logger.save()

    def _pop_step(self, scalars: dict[str, Any]) -> Any:
        """Return the position of values on the x-axis, and add the number of the epoch if it counts steps."""
        step = scalars.pop("step", None)
        if step is not None:
            return step
        if self._evaluated is not None:
            epoch, step = self._evaluated
            scalars.setdefault("epoch", epoch)
            return step
        scalars.setdefault("epoch", self._state.current_epoch)
        return self._state.progress.batches_that_stepped

    def hand_over_last_step(self) -> None:
        """Pass the values of the last training step to listeners alone, for a fit that ends within an epoch.

        The values may wait for their device, and need the other processes if they are synchronised.
        """
        state = self._state
        if not state.metric_listeners or not state.training:
            return
        step = state.progress.batches_that_stepped
        # A step that failed before it has logged anything leaves the values of the step before.
        if not self.logs.pending:
            step = max(0, step - 1)
        scalars = to_scalars(self.logs.metrics())
        for listen in state.metric_listeners:
            listen(self._trainer, scalars, step)
