"""Refuse callbacks whose reports to Ray would be lost, because they run in processes that Ray does not know."""

from collections.abc import Iterable
from typing import Any

from equipoise.errors import ConfigurationError

__all__ = ["refuse_lost_reports"]


def refuse_lost_reports(callbacks: Iterable[Any]) -> None:
    """Check the callbacks of a run in processes that the strategy starts.

    A callback runs in those processes. A trial of Ray Tune, and a worker of Ray Train, is the process that starts them:
    only that one can report, and Ray passes over the reports of others in silence.

    Args:
        callbacks: The callbacks of the run.

    Raises:
        ConfigurationError: If one of them reports to Ray.
    """
    for callback in callbacks:
        if _reports_to_ray(callback):
            raise ConfigurationError(
                f"{type(callback).__name__} reports to Ray, but the strategy would start processes of its own, in which"
                " Ray takes no reports: all of them would be lost. Take devices=1 or a strategy that computes in one"
                " process, such as 'dp'; or start the workers by ray.train.torch.TorchTrainer, also inside of a trial."
            )


def _reports_to_ray(callback: Any) -> bool:
    """Return True for callbacks of Ray, and for others that have an attribute `reports_to_ray`."""
    packages = {base.__module__.partition(".")[0] for base in type(callback).__mro__}
    return "ray" in packages or getattr(callback, "reports_to_ray", False)
