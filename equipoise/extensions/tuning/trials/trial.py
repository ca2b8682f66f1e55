"""Short runs of a copy of the module, without effects on the module, the trainer and random generators."""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.trainer.states import TrainerFn

from equipoise.errors import ConfigurationError
from equipoise.extensions.common.trial_arguments import ONLY_STEPS
from equipoise.extensions.planning.description.settings import changes_layers
from equipoise.interop.lightning.arguments.plugins import sort_plugins
from equipoise.interop.lightning.loaders import combine
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.data.loader_state import load_random_state, random_state_of
from equipoise.trainer.runtime.request import Request

__all__ = ["MakeTrainer", "copy_of", "generators_kept", "quiet", "run_trial", "trainer_like"]

# Makes a trainer from its arguments.
MakeTrainer = Callable[..., Any]

# The logger of `rank_zero_info`.
_LOGGER = "lightning.pytorch.utilities.rank_zero"

# What the trial of a search changes beside its steps.
_OF_A_TRIAL = {
    "logger": False,
    # A large learning rate is meant to make losses that are not finite.
    "detect_anomaly": False,
    "detect_nonfinite": False,
}


def run_trial(
    trainer: Any,
    make: MakeTrainer,
    request: Request,
    module: LightningModule,
    *,
    steps: int,
    callbacks: list[Callback],
) -> None:
    """Train a copy of the module for some steps, or evaluate it on some batches, as the trainer would.

    Args:
        trainer: The trainer.
        make: Makes the trainer of the trial.
        request: The run before which the trial runs. Loaders of an evaluation are those of the module or data module.
        module: The copy.
        steps: Number of optimiser steps, or of batches of an evaluation.
        callbacks: Callbacks of the trial.
    """
    train = request.loaders.get("train")
    limits = {f"limit_{stage}_batches": steps for stage in ("val", "test", "predict")}
    if request.fitting:
        limits = {"max_steps": steps}
    with generators_kept(train), quiet():
        trial = trainer_like(trainer, make, **limits, callbacks=callbacks)
        if request.fitting:
            trial.fit(module, train, datamodule=request.datamodule)
        elif request.fn == TrainerFn.PREDICTING:
            trial.predict(module, datamodule=request.datamodule, return_predictions=False)
        else:
            evaluate = getattr(trial, request.fn.value)
            evaluate(module, datamodule=request.datamodule, verbose=False)


def trainer_like(trainer: Any, make: MakeTrainer, **changed: Any) -> Any:
    """Return the trainer of a trial: that of the user without files, loggers and display.

    Args:
        trainer: The user's trainer.
        make: Makes it.
        changed: Arguments of the trial; a strategy among them takes the place of the trainer's.
    """
    options = {**trainer.constructor_arguments, **ONLY_STEPS, **_OF_A_TRIAL, **changed}
    # The scaler of a precision that was passed as an object belongs to one trainer, as a strategy does.
    options["precision"] = copy.deepcopy(options.get("precision"))
    strategy = options.get("strategy")
    # "auto" has been chosen already.
    if "strategy" not in changed and (strategy is None or strategy == "auto" or isinstance(strategy, Strategy)):
        options["strategy"] = copy.deepcopy(trainer.connected_strategy)
    # Frozen weights in few bits leave more memory, and products in float8 other losses.
    changing = [copy.deepcopy(callback) for callback in trainer.callbacks if changes_layers(callback)]
    options["callbacks"] = [*changing, *options["callbacks"]]
    # The user may have set these since.
    options["accumulate_grad_batches"] = trainer.accumulate_grad_batches
    options["gradient_clip_val"] = trainer.gradient_clip_val
    options["gradient_clip_algorithm"] = trainer.gradient_clip_algorithm

    # Of the plugins, the one that says which signal requeues a job.
    options["plugins"] = sort_plugins(options.get("plugins")).environment
    return make(**options)


def copy_of(module: LightningModule, finder: str) -> LightningModule:
    """Return a copy of the module.

    Args:
        module: The module.
        finder: Name of the callback that trains the copy.

    Raises:
        ConfigurationError: If the module cannot be copied.
    """
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise ConfigurationError(
            f"{finder} trains a copy of the module, but {type(module).__name__} cannot be copied:"
            f" {type(error).__name__}: {error}. Create such objects in `setup`."
        ) from error


@contextmanager
def generators_kept(train: Any) -> Iterator[None]:
    """Put all random generators back at the end, those of the training loaders that were passed included."""
    loaders = _loaders_in(train)
    state = random_state_of(loaders)
    try:
        yield
    finally:
        load_random_state(loaders, state)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the messages of a fit, such as the reason why it ended; warnings remain."""
    logger = logging.getLogger(_LOGGER)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _loaders_in(train: Any) -> list[Any]:
    """Return the loaders of training that were passed."""
    if train is None:
        return []
    combined, _ = combine(train, "max_size_cycle")
    return list(combined.flattened)
