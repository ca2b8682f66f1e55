"""The predicted peaks of a strategy: the one place where a prediction joins the comparison."""

from equipoise.app.comparison.candidates.candidates import Attempt

__all__ = ["predicted_peaks"]


def predicted_peaks(attempt: Attempt) -> dict[str, int] | None:
    """Return the predicted peak of each device in bytes, by the names of the measured ones; None: no prediction.

    Args:
        attempt: The configuration with a strategy.
    """
    return None
