"""The search for a learning rate before a fit: a trial whose rate grows from step to step."""

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.parsing import lightning_hasattr, lightning_setattr
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.errors import ConfigurationError
from equipoise.extensions.common.suggested_rate import suggested_rate
from equipoise.extensions.tuning.interop import (
    LearningRateSettings,
    keep_learning_rates,
    learning_rate_settings,
    results_of,
)
from equipoise.extensions.tuning.learning_rate_sweep import LearningRateSweep
from equipoise.extensions.tuning.trials.trial import MakeTrainer, copy_of, run_trial
from equipoise.notices import rank_zero_warn
from equipoise.trainer.runtime.request import Request

__all__ = ["find_learning_rate"]

_FINDER = "LearningRateFinder"
# Usual names of a module's learning rate.
_ATTRIBUTES = ("lr", "learning_rate")


def find_learning_rate(trainer: Any, make: MakeTrainer, request: Request, finder: Any) -> None:
    """Search a learning rate, give it to the module, and keep the results in the finder.

    Raises:
        ConfigurationError: If a setting is impossible, or if the module has no attribute for the rate, has manual
            optimisation, or cannot be copied.
    """
    # 1. Everything that can be wrong without a step.
    settings = learning_rate_settings(finder)
    _check_settings(settings)
    module = request.module
    attribute = _attribute_of(module, settings)
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{_FINDER} needs automatic optimisation, but the module has automatic_optimization=False."
        )

    # 2. The fit.
    sweep = LearningRateSweep(settings)
    run_trial(trainer, make, request, copy_of(module, _FINDER), steps=settings.steps, callbacks=[sweep])
    if sweep.has_diverged:
        rank_zero_info(f"The search for a learning rate ended after {len(sweep.rates)} steps: the loss grew.")

    # 3. Its result.
    results = results_of(finder, settings, sweep.rates, sweep.losses)
    keep_learning_rates(finder, results)
    if attribute is not None:
        _apply(module, attribute, suggested_rate(results), len(sweep.rates))


def _check_settings(settings: LearningRateSettings) -> None:
    if settings.steps < 1:
        raise ConfigurationError(f"{_FINDER}: num_training_steps={settings.steps}, but it must be at least 1.")
    if settings.smallest >= settings.largest:
        raise ConfigurationError(
            f"{_FINDER}: min_lr={settings.smallest} must be smaller than max_lr={settings.largest}."
        )
    if settings.smallest < 0:
        raise ConfigurationError(f"{_FINDER}: min_lr={settings.smallest}, but a learning rate cannot be negative.")
    if settings.mode == "exponential" and settings.smallest == 0:
        raise ConfigurationError(
            f"{_FINDER}: min_lr={settings.smallest}, but an exponential search begins above 0. Choose a small rate such"
            ' as 1e-8, or mode="linear".'
        )


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
        f"{_FINDER}: {type(module).__name__} has no attribute or hyperparameter {listed} to set. Name it by attr_name,"
        " or pass update_attr=False."
    )
