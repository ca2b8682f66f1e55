"""Private names of Lightning's finders: the settings of a search, and the object that shows its results.

Both of Lightning's finders keep their arguments under private names and offer nothing else. The object with the results
of a search for a learning rate, with `suggestion` and `plot`, has a private class. A test notices when one of these
names changes.
"""

from dataclasses import dataclass
from typing import Any

from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner.lr_finder import _LRFinder

from equipoise.interop.lightning.classes import base_of, is_a

__all__ = [
    "BatchSizeSettings",
    "LearningRateSettings",
    "batch_size_settings",
    "ends_after_search",
    "is_finder",
    "is_stock_finder",
    "keep_batch_size",
    "keep_learning_rates",
    "learning_rate_settings",
    "results_of",
    "searches_learning_rate",
    "suggested_rate",
]

# A suggestion leaves out the first ten steps and the last one, and compares two others at least.
_FEWEST_STEPS = 13


@dataclass(frozen=True)
class LearningRateSettings:
    """Arguments of a LearningRateFinder.

    Attributes:
        smallest: The first learning rate.
        largest: The last learning rate.
        steps: Number of optimiser steps.
        mode: "exponential" or "linear", the way in which the rate grows.
        divergence: The search ends when the loss is larger than this number of times the smallest loss; None: never.
        updates_attribute: Whether the module receives the suggested rate.
        attribute: Name of the module's attribute or hyperparameter; empty: `lr` or `learning_rate`.
    """

    smallest: float
    largest: float
    steps: int
    mode: str
    divergence: float | None
    updates_attribute: bool
    attribute: str


@dataclass(frozen=True)
class BatchSizeSettings:
    """Arguments of a BatchSizeFinder.

    Attributes:
        doubles: True for "power": the result is the first size times a power of two. False for "binsearch".
        steps: Number of steps with which a size is confirmed.
        first: The first size.
        most_trials: Largest number of sizes to try.
        attribute: Name of the attribute or hyperparameter of the module or data module.
        margin: Part by which the largest size is reduced, if it is no power of two.
        largest: Largest size to find.
    """

    doubles: bool
    steps: int
    first: int
    most_trials: int
    attribute: str
    margin: float
    largest: int


def is_finder(callback: Any) -> bool:
    """Return True for a callback of Lightning's tuner."""
    return is_a(callback, BatchSizeFinder, LearningRateFinder)


def is_stock_finder(callback: Any) -> bool:
    """Return True for one of Lightning's finders itself; a class derived from it may search at other times."""
    for kind in (BatchSizeFinder, LearningRateFinder):
        if is_a(callback, kind):
            return type(callback) is base_of(callback, kind)
    return False


def searches_learning_rate(finder: Any) -> bool:
    """Return True for a LearningRateFinder, False for a BatchSizeFinder."""
    return is_a(finder, LearningRateFinder)


def learning_rate_settings(finder: Any) -> LearningRateSettings:
    """Return the arguments of a LearningRateFinder."""
    return LearningRateSettings(
        smallest=finder._min_lr,
        largest=finder._max_lr,
        steps=finder._num_training_steps,
        mode=finder._mode,
        divergence=finder._early_stop_threshold,
        updates_attribute=finder._update_attr,
        attribute=finder._attr_name,
    )


def ends_after_search(finder: Any) -> bool:
    """Return True if a method of the Tuner has added the finder, which wants the search alone."""
    return bool(finder._early_exit)


def results_of(settings: LearningRateSettings, rates: list[float], losses: list[float]) -> Any:
    """Return the results of a search as Lightning's object, with `results`, `suggestion()` and `plot()`.

    Args:
        settings: The arguments of the search.
        rates: Learning rates, by steps.
        losses: Smoothed losses, by steps.
    """
    results = _LRFinder(settings.mode, settings.smallest, settings.largest, settings.steps)
    results.results.update({"lr": rates, "loss": losses})
    return results


def keep_learning_rates(finder: Any, results: Any) -> None:
    """Set what a LearningRateFinder offers after its search."""
    finder.optimal_lr = results


def batch_size_settings(finder: Any) -> BatchSizeSettings:
    """Return the arguments of a BatchSizeFinder."""
    return BatchSizeSettings(
        doubles=finder._mode == "power",
        steps=finder._steps_per_trial,
        first=finder._init_val,
        most_trials=finder._max_trials,
        attribute=finder._batch_arg_name,
        margin=finder._margin,
        largest=finder._max_val,
    )


def keep_batch_size(finder: Any, batch_size: int) -> None:
    """Set what a BatchSizeFinder offers after its search."""
    finder.optimal_batch_size = batch_size


def suggested_rate(results: Any) -> float | None:
    """Return the rate that a search suggests; None after too few steps.

    Args:
        results: What `results_of` has returned.
    """
    # Lightning logs an error in this case, which a report or a search need not repeat.
    if len(results.results["lr"]) < _FEWEST_STEPS:
        return None
    rate: float | None = results.suggestion()
    return rate
