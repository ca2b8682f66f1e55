"""Pass logged values to loggers, and to callbacks that draw them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from equipoise.trainer.logging.results_table import to_scalars

if TYPE_CHECKING:
    from equipoise.trainer.trainer import Trainer

__all__ = ["LoggerOutput", "MetricListener"]

MetricListener = Callable[[Any, dict[str, Any], int], None]


class LoggerOutput:
    """Hands values to loggers and listeners.

    A listener is called with the trainer, the values by name, and the number of optimiser steps done before the present
    one. Values are read from their devices once for loggers and listeners together. As the values of a step may be
    synchronised between processes, all processes must have listeners, or none.

    Attributes:
        metric_listeners: What is called with the values that go to loggers, also if there is no logger.
    """

    def __init__(self) -> None:
        super().__init__()
        self.metric_listeners: list[MetricListener] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Hands values to the loggers.

        Args:
            metrics: Values by name.
            step: Where they stand on the x-axis. None: the value named "step" if there is one, else the number of
                steps. With a step of their own, values are not for listeners: it may count something else.
        """
        trainer: Trainer = self  # type: ignore[assignment]
        listeners = self.metric_listeners if step is None else ()
        if not metrics or not (trainer.loggers or listeners):
            return
        scalars = to_scalars(metrics)
        for listen in listeners:
            listen(trainer, scalars, trainer.progress.batches_that_stepped)
        if not trainer.loggers:
            return
        trainer.logs.logged_metrics.update(metrics)
        if step is None:
            step = scalars.pop("step", None)
            if step is None:
                scalars.setdefault("epoch", trainer.current_epoch)
                step = trainer.progress.batches_that_stepped
        for logger in trainer.loggers:
            logger.log_metrics(metrics=scalars, step=int(step))
            logger.save()

    def hand_over_last_step(self) -> None:
        """Hands the values of the last training step to listeners alone, for a fit that ends in the midst of an epoch.

        The values may wait for their device, and need the other processes where they are synchronised.
        """
        trainer: Trainer = self  # type: ignore[assignment]
        if not self.metric_listeners or not trainer.training:
            return
        step = trainer.progress.batches_that_stepped
        if not trainer.logs.pending:  # the step that failed has logged nothing
            step = max(0, step - 1)
        scalars = to_scalars(trainer.logs.metrics())
        for listen in self.metric_listeners:
            listen(trainer, scalars, step)
