"""The search for a learning rate, before a fit.

The search is a short fit of its own: a second trainer with the same arguments trains a copy of the module. So the
module, its optimisers, the counters, the callbacks and the loggers of the fit are never touched by it. All random
generators are put back.
"""

import copy
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.parsing import lightning_hasattr, lightning_setattr
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.classes import is_a
from equipoise.interop.lightning.finders import (
    LearningRateSettings,
    ends_after_search,
    is_stock_finder,
    keep_results,
    results_of,
    settings_of,
    suggested_rate,
)
from equipoise.notices import rank_zero_warn
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.data.loader_state import load_random_state, random_state_of
from equipoise.trainer.optimization.learning_rate.sweep import LearningRateSweep
from equipoise.trainer.runtime.request import Request

__all__ = ["find_learning_rates", "options_of_search"]

# Makes a trainer from its arguments.
MakeTrainer = Callable[..., Any]

# Usual names of a module's learning rate.
_ATTRIBUTES = ("lr", "learning_rate")

# All that is no part of a training step is left out.
_WITHOUT = {
    "max_epochs": -1,
    "min_epochs": None,
    "min_steps": None,
    "max_time": None,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "fast_dev_run": False,
    "barebones": False,
    "logger": False,
    "profiler": None,
    "plugins": None,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    # A large learning rate is meant to make losses that are not finite.
    "detect_anomaly": False,
    "detect_nonfinite": False,
}


def find_learning_rates(trainer: Any, make: MakeTrainer, request: Request) -> bool:
    """Search learning rates for each LearningRateFinder among the callbacks.

    Args:
        trainer: The trainer.
        make: Makes the trainer of the search.
        request: The fit before which the search runs.

    Returns:
        True if the fit shall follow; False if `Tuner.lr_find` wanted the search alone.

    Raises:
        ConfigurationError: If the module has no attribute for the rate, several optimisers or manual optimisation, or
            cannot be copied.
    """
    goes_on = True
    for finder in list(trainer.callbacks):
        if not is_stock_finder(finder):
            continue
        goes_on = goes_on and not ends_after_search(finder)
        if trainer.fast_dev_run:
            rank_zero_warn("fast_dev_run: the search for a learning rate is left out.")
            continue
        if request.ckpt_path is not None:
            rank_zero_info("The fit goes on from a checkpoint, so it searches no learning rate.")
            continue
        results = _find(trainer, make, request, settings_of(finder))
        keep_results(finder, results)
    return goes_on


def _find(trainer: Any, make: MakeTrainer, request: Request, settings: LearningRateSettings) -> Any:
    """Search, give the module the suggested rate, and return the results."""
    # 1. Everything that can be wrong without a step.
    module = request.module
    attribute = _attribute_of(module, settings)
    if not module.automatic_optimization:
        raise ConfigurationError(
            "LearningRateFinder needs automatic optimisation, but the module has automatic_optimization=False."
        )

    # 2. The fit.
    sweep = LearningRateSweep(settings)
    options = options_of_search(trainer) | {"max_steps": settings.steps, "callbacks": [sweep]}
    loaders = _given_loaders(request)
    state = random_state_of(loaders)
    try:
        search = make(**options)
        search.fit(_copy_of(module), request.loaders.get("train"), datamodule=request.datamodule)
    finally:
        load_random_state(loaders, state)
    if sweep.has_diverged:
        rank_zero_info(f"The search for a learning rate ended after {len(sweep.rates)} steps: the loss grew.")

    # 3. Its result.
    results = results_of(settings, sweep.rates, sweep.losses)
    if attribute is not None:
        _apply(module, attribute, suggested_rate(results), len(sweep.rates))
    return results


def _apply(module: LightningModule, attribute: str, rate: float | None, steps: int) -> None:
    if rate is None:
        rank_zero_warn(
            f"The search for a learning rate made {steps} steps, too few for a suggestion: it leaves out the first 10."
            f" `{attribute}` stays as it is."
        )
        return
    lightning_setattr(module, attribute, rate)
    rank_zero_info(f"Learning rate set to {rate}")


def _attribute_of(module: LightningModule, settings: LearningRateSettings) -> str | None:
    """Return the name of the attribute that receives the rate; None if none shall."""
    if not settings.updates_attribute:
        return None
    names = (settings.attribute,) if settings.attribute else _ATTRIBUTES
    for name in names:
        if lightning_hasattr(module, name):
            return name
    listed = " or ".join(f"`{name}`" for name in names)
    raise ConfigurationError(
        f"LearningRateFinder: {type(module).__name__} has no attribute or hyperparameter {listed} to set. Name it by"
        " attr_name, or pass update_attr=False."
    )


def options_of_search(trainer: Any) -> dict[str, Any]:
    """Return arguments for a trainer that trains as this one, and does nothing else.

    Args:
        trainer: The trainer.
    """
    options = {**trainer.arguments, **_WITHOUT}
    strategy = options.get("strategy")
    # A strategy belongs to one trainer.
    if isinstance(strategy, Strategy):
        options["strategy"] = copy.deepcopy(strategy)
    # The user may have set these since.
    options["accumulate_grad_batches"] = trainer.accumulate_grad_batches
    options["gradient_clip_val"] = trainer.gradient_clip_val
    options["gradient_clip_algorithm"] = trainer.gradient_clip_algorithm
    return options


def _copy_of(module: LightningModule) -> LightningModule:
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise ConfigurationError(
            f"LearningRateFinder trains a copy of the module, but {type(module).__name__} cannot be copied:"
            f" {type(error).__name__}: {error}. Create such objects in `setup`."
        ) from error


def _given_loaders(request: Request) -> list[Any]:
    """Return the loaders of training that were passed, whose generators the search moves on."""
    train = request.loaders.get("train")
    if train is None:
        return []
    combined = train if is_a(train, CombinedLoader) else CombinedLoader(train)
    return list(combined.flattened)
