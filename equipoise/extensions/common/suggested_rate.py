"""The learning rate that the results of a search suggest."""

from typing import Any

__all__ = ["suggested_rate"]

# A suggestion leaves out the first ten steps and the last one, and compares two others at least.
_FEWEST_STEPS = 13


def suggested_rate(results: Any) -> float | None:
    """Return the rate that a search suggests; None after too few steps.

    Args:
        results: Lightning's object with the results.
    """
    # Lightning logs an error in this case, which a report or a search need not repeat.
    if len(results.results["lr"]) < _FEWEST_STEPS:
        return None
    rate: float | None = results.suggestion()
    return rate
