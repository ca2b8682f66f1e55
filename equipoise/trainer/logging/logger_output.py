"""Pass logged values to loggers, and to callbacks that draw them."""

from typing import Any

from equipoise.trainer.logging.logs import Logs
from equipoise.trainer.logging.results_table import to_scalars
from equipoise.trainer.state.run_state import RunState

__all__ = ["LoggerOutput"]


class LoggerOutput:
    """Hands values to loggers and listeners.

    A listener is called with the trainer, the values by name, and the number of optimiser steps done before the present
    one. Values are read from their devices once for loggers and listeners together. As the values of a step may be
    synchronised between processes, all processes must have listeners, or none.

    Args:
        state: Holds the loggers and the listeners.
        logs: The logged values.
        trainer: The first argument of listeners.
    """

    def __init__(self, state: RunState, logs: Logs, trainer: object) -> None:
        self._state = state
        self._logs = logs
        self._trainer = trainer

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Hands values to the loggers.

        Args:
            metrics: Values by name.
            step: Where they stand on the x-axis. None: the value named "step" if there is one, else the number of
                steps. With a step of their own, values are not for listeners: it may count something else.
        """
        state = self._state
        listeners = state.metric_listeners if step is None else ()
        if not metrics or not (state.loggers or listeners):
            return
        scalars = to_scalars(metrics)
        for listen in listeners:
            listen(self._trainer, scalars, state.progress.batches_that_stepped)
        if not state.loggers:
            return
        self._logs.logged_metrics.update(metrics)
        if step is None:
            step = scalars.pop("step", None)
            if step is None:
                scalars.setdefault("epoch", state.current_epoch)
                step = state.progress.batches_that_stepped
        for logger in state.loggers:
            logger.log_metrics(metrics=scalars, step=int(step))
            logger.save()

    def hand_over_last_step(self) -> None:
        """Hands the values of the last training step to listeners alone, for a fit that ends in the midst of an epoch.

        The values may wait for their device, and need the other processes where they are synchronised.
        """
        state = self._state
        if not state.metric_listeners or not state.training:
            return
        step = state.progress.batches_that_stepped
        if not self._logs.pending:  # the step that failed has logged nothing
            step = max(0, step - 1)
        scalars = to_scalars(self._logs.metrics())
        for listen in state.metric_listeners:
            listen(self._trainer, scalars, step)
