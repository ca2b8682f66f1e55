"""Reports of a job to the launcher of its sweep, in the process of the job."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from equipoise.callbacks.callback import Callback

__all__ = ["JobProgress", "Progress", "callbacks_of_job", "report_metrics", "reporting_to"]


@dataclass(frozen=True)
class Progress:
    """Position of a job.

    Attributes:
        metrics: The last logged values.
        epoch: Number of finished epochs; None after the end of the run.
        step: Number of optimiser steps; None after the end of the run.
    """

    metrics: Mapping[str, float]
    epoch: int | None = None
    step: int | None = None


Report = Callable[[Progress], None]

# The function that receives the reports of this process; none outside of a job.
_receivers: list[Report] = []


@contextmanager
def reporting_to(receive: Report) -> Iterator[None]:
    """Pass the reports of a block's runs to a function.

    Args:
        receive: Called at the end of each epoch, and at the end of the run.
    """
    _receivers.append(receive)
    try:
        yield
    finally:
        _receivers.remove(receive)


def callbacks_of_job() -> list[Callback]:
    """Return the callbacks that a run needs as a job of a sweep; none in other runs."""
    return [JobProgress(receive) for receive in _receivers]


def report_metrics(metrics: Mapping[str, float]) -> None:
    """Report the metrics with which a run has ended."""
    for receive in _receivers:
        receive(Progress(metrics))


class JobProgress(Callback):
    """Reports the metrics of each epoch. Reading them waits for the device once an epoch."""

    def __init__(self, receive: Report) -> None:
        self._receive = receive

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Report the values of the epoch."""
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._receive(Progress(metrics, trainer.current_epoch + 1, trainer.global_step))
