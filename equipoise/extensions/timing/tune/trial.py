"""One trial: a short fit of the configuration, in the process of the trial."""

import json
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from equipoise.app.running import run_values
from equipoise.errors import ConfigurationError, in_one_line
from equipoise.extensions.common.trial_arguments import UNBOUNDED
from equipoise.extensions.timing.step_times import StepTimes
from equipoise.extensions.timing.tune.probe import StepsProbe, Window
from equipoise.names.tracebacks import shortened

__all__ = ["as_trial", "explain", "measure"]

# Beyond any trial. It is a positive number, as schedules may count with it.
_MOST_STEPS = 1_000_000
# The trainer ends when the window does, and prints nothing.
_ENDLESS = {**UNBOUNDED, "max_epochs": _MOST_STEPS, "max_steps": _MOST_STEPS}
# Loggers that write elsewhere than into the folder of a run.
_SERVICES = ("CometLogger", "MLFlowLogger", "NeptuneLogger", "WandbLogger")
# Arguments of callbacks, loggers and the trainer that are folders.
_FOLDERS = ("default_root_dir", "dirpath", "save_dir")


def as_trial(values: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return a configuration that trains until it is stopped and writes into one folder, and what it leaves out.

    Args:
        values: The configuration of a fit, checked.
        folder: The folder.
    """
    trial = dict(values)
    trial |= {"output_dir": str(folder), "ckpt_path": None, "test": False}
    if trial["seed"] is None:
        # Two trials would begin with different weights.
        trial["seed"] = 0
    trial["trainer"] = _redirected(trial["trainer"], folder) | _ENDLESS
    left_out = []
    for group in ("callbacks", "logger"):
        members = {}
        for name, node in (trial[group] or {}).items():
            class_name = (node or {}).get("_target_", "").rpartition(".")[2]
            if class_name in _SERVICES:
                left_out.append(name)
            elif node is not None and class_name != StepTimes.__name__:
                members[name] = _redirected(node, folder)
        trial[group] = members
    return trial, left_out


def _redirected(node: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return arguments whose folders lie in another one."""
    redirected = dict(node)
    for name in _FOLDERS:
        path = node.get(name)
        if isinstance(path, str) and not Path(path).is_relative_to(folder):
            redirected[name] = str(folder / name)
    return redirected


def measure(values: dict[str, Any], loader: Mapping[str, Any], window: Window, folder: Path) -> dict[str, Any]:
    """Fit, and return the measurements of a window of steps.

    Args:
        values: The configuration; see `as_trial`.
        loader: Arguments of the training DataLoader that are replaced.
        window: The window.
        folder: Folder for files of the trial, which exists.

    Raises:
        ConfigurationError: If the training ends before the window does.
    """
    file = folder / "times.json"
    times = StepTimes(first_steps=window.first_steps)
    run_values(values, [times, StepsProbe(times, window, file, loader)])
    if not file.is_file():
        raise ConfigurationError(
            "The training ended before its steps were measured: a callback or the module has stopped it, or there are"
            " no batches."
        )
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result


def explain(error: Exception) -> str:
    """Return the traceback of an error of the user's program, and the message alone of any other."""
    if isinstance(error, ConfigurationError):
        return in_one_line(error)
    return "".join(traceback.format_exception(shortened(error))).strip()
