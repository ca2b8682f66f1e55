"""Private names of Lightning's finders: the settings of a search, and the object that shows its results.

Both of Lightning's finders keep their arguments under private names and offer nothing else. The object with the results
of a search for a learning rate, with `suggestion` and `plot`, has a private class. Without one of these names, the
search is refused before its first step.
"""

from dataclasses import dataclass
from typing import Any

from lightning.pytorch.callbacks import LearningRateFinder

from equipoise.interop.adapters import find
from equipoise.interop.lightning.classes import base_of, is_a
from equipoise.interop.refusal import refusal

__all__ = [
    "BatchSizeSettings",
    "LearningRateSettings",
    "batch_size_settings",
    "ends_after_search",
    "keep_batch_size",
    "keep_learning_rates",
    "learning_rate_settings",
    "results_of",
    "searches_learning_rate",
]

# Attributes of the finders, by the settings below.
_OF_RATES = {
    "smallest": "_min_lr",
    "largest": "_max_lr",
    "steps": "_num_training_steps",
    "mode": "_mode",
    "divergence": "_early_stop_threshold",
    "updates_attribute": "_update_attr",
    "attribute": "_attr_name",
}
_OF_BATCH_SIZES = {
    "doubles": "_mode",
    "steps": "_steps_per_trial",
    "first": "_init_val",
    "most_trials": "_max_trials",
    "attribute": "_batch_arg_name",
    "margin": "_margin",
    "largest": "_max_val",
}
# The class of the results of a search for a learning rate, which has no public name.
_PACKAGE = "lightning.pytorch"
_RESULTS = f"{_PACKAGE}.tuner.lr_finder._LRFinder"


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


def searches_learning_rate(finder: Any) -> bool:
    """Return True for a LearningRateFinder, False for a BatchSizeFinder."""
    return is_a(finder, LearningRateFinder)


def learning_rate_settings(finder: Any) -> LearningRateSettings:
    """Return the arguments of a LearningRateFinder.

    Raises:
        ConfigurationError: If they cannot be read, or there is no class for the results.
    """
    remedy = "Set the learning rate by hand."
    # Before the search, whose steps would be lost.
    if find(_RESULTS) is None:
        raise refusal("LearningRateFinder", "lightning", [_RESULTS], remedy)
    return LearningRateSettings(**_arguments_of(finder, _OF_RATES, remedy))


def _arguments_of(finder: Any, names: dict[str, str], remedy: str) -> dict[str, Any]:
    """Return attributes of a finder; without one of them, or a sign of who has added the finder, it is refused."""
    kind = type(finder).__name__
    # The last one is what `ends_after_search` reads.
    missing = [f"{kind}.{name}" for name in (*names.values(), "_early_exit") if not hasattr(finder, name)]
    if missing:
        raise refusal(kind, "lightning", missing, remedy)
    return {setting: getattr(finder, name) for setting, name in names.items()}


def ends_after_search(finder: Any) -> bool:
    """Return True if a method of the Tuner has added the finder, which wants the search alone."""
    return bool(getattr(finder, "_early_exit", False))


def results_of(finder: Any, settings: LearningRateSettings, rates: list[float], losses: list[float]) -> Any:
    """Return the results of a search as Lightning's object, with `results`, `suggestion()` and `plot()`.

    Args:
        finder: The LearningRateFinder; its package is that of the object.
        settings: The arguments of the search.
        rates: Learning rates, by steps.
        losses: Smoothed losses, by steps.
    """
    # The older package has a class of its own.
    package = base_of(finder, LearningRateFinder).__module__.partition(".callbacks.")[0]
    kind = find(_RESULTS.replace(_PACKAGE, package))
    results = kind(settings.mode, settings.smallest, settings.largest, settings.steps)
    results.results.update({"lr": rates, "loss": losses})
    return results


def keep_learning_rates(finder: Any, results: Any) -> None:
    """Set what a LearningRateFinder offers after its search."""
    finder.optimal_lr = results


def batch_size_settings(finder: Any) -> BatchSizeSettings:
    """Return the arguments of a BatchSizeFinder.

    Raises:
        ConfigurationError: If they cannot be read.
    """
    remedy = "Set the batch size by hand; `equipoise plan` predicts the largest."
    arguments = _arguments_of(finder, _OF_BATCH_SIZES, remedy)
    arguments["doubles"] = arguments["doubles"] == "power"
    return BatchSizeSettings(**arguments)


def keep_batch_size(finder: Any, batch_size: int) -> None:
    """Set what a BatchSizeFinder offers after its search."""
    finder.optimal_batch_size = batch_size
