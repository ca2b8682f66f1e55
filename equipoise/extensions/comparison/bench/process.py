"""A trial in a process of its own, with a time limit: its start, and the values that it needs there."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import seed_everything

from equipoise.app.build import build
from equipoise.extensions.tuning.trials.trial import ONLY_STEPS
from equipoise.parallel.workers.bounded_call import CallError, call_bounded

__all__ = ["build_data_and_module", "limit_to_steps", "run_trial"]


def run_trial(
    measure: Callable[..., dict[str, Any]],
    *arguments: Any,
    folder: Path,
    paths: Sequence[str],
    timeout: float,
) -> dict[str, Any]:
    """Run a trial in a process of its own and return its result.

    Args:
        measure: The function of a module that runs the trial and returns the measurements.
        arguments: Its arguments before the folder.
        folder: A new folder for files of the trial.
        paths: Folders from which the process imports the user's modules.
        timeout: Seconds after which the process is ended.

    Returns:
        The measurements, or under "reason" why there are none; then "is_error" tells whether `measure` has raised an
        error, and "is_configuration" whether that is a `ConfigurationError`.
    """
    folder.mkdir()
    try:
        measured: dict[str, Any] = call_bounded(
            measure,
            *arguments,
            folder,
            timeout=timeout,
            paths=paths,
            option=" (--timeout=SECONDS)",
        )
    except CallError as error:
        # A failure is a result as well: the row of the trial shows it.
        return {"reason": str(error), "is_error": error.is_raised, "is_configuration": error.is_wrong_input}
    return measured


def build_data_and_module(values: dict[str, Any]) -> tuple[Any, Any]:
    """Build the data module, None if there is none, and the module, from the seed of the configuration.

    Args:
        values: The configuration. Without a seed it is 0, since two trials would begin with different weights.
    """
    seed = values["seed"]
    if seed is None:
        seed = 0
    seed_everything(seed, workers=True)
    # Data before the module, which may draw random numbers as well.
    data = None
    if values.get("data"):
        data = build(values["data"], "data")
    return data, build(values["module"], "module")


def limit_to_steps(values: dict[str, Any], steps: int, folder: Path) -> None:
    """Change a configuration, so that the trainer takes some optimiser steps and does nothing else."""
    arguments = values["trainer"]
    arguments |= ONLY_STEPS
    arguments["max_steps"] = steps
    arguments["default_root_dir"] = str(folder)
