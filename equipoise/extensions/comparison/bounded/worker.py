"""The process of a trial: reads the request of its folder and writes the result there, both as JSON."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import seed_everything

from equipoise.app.build import build
from equipoise.errors import ConfigurationError
from equipoise.extensions.tuning.trials.trial import ONLY_STEPS

__all__ = ["REQUEST", "RESULT", "Trial", "answer", "build_data_and_module", "limit_to_steps"]

# Runs a trial: takes the request and the folder, and returns the measurements.
Trial = Callable[[dict[str, Any], Path], dict[str, Any]]

# Names of the files.
REQUEST = "request.json"
RESULT = "result.json"


def answer(folder: Path, run: Trial) -> None:
    """Run the trial of a folder, and write its result there; an error becomes its reason.

    Args:
        folder: The folder with the request, which has the configuration under "values", and under "paths" the folders
            from which the user's modules are imported.
        run: Function that runs the trial.
    """
    text = (folder / REQUEST).read_text(encoding="utf-8")
    request = json.loads(text)
    # The command looks in folders of its own for the user's modules.
    sys.path[:0] = request["paths"]
    try:
        result = run(request, folder)
    except Exception as error:
        message = str(error).strip()
        first_line, _, _ = message.partition("\n")
        is_wrong_input = isinstance(error, ConfigurationError)
        reason = first_line
        if not is_wrong_input:
            reason = f"{type(error).__name__}: {first_line}"
        result = {"reason": reason, "is_configuration": is_wrong_input, "is_error": True}
    # A file that is there is complete.
    text = json.dumps(result)
    unfinished = folder / f"{RESULT}.part"
    unfinished.write_text(text, encoding="utf-8")
    unfinished.rename(folder / RESULT)


def build_data_and_module(values: dict[str, Any]) -> tuple[Any, Any]:
    """Build the data module, None if there is none, and the module, from the seed of the configuration.

    Args:
        values: The configuration. Without a seed it is 0, since two trials would begin with different weights.
    """
    seed = values["seed"]
    if seed is None:
        seed = 0
    seed_everything(seed, workers=True)
    data = None
    if values.get("data"):
        data = build(values["data"], "data")
    module = build(values["module"], "module")
    return data, module


def limit_to_steps(values: dict[str, Any], steps: int, folder: Path) -> None:
    """Change the trainer's arguments, so that it takes some steps and does nothing else.

    Args:
        values: The configuration.
        steps: Number of steps of the optimiser.
        folder: Folder for files of the trainer.
    """
    arguments = values["trainer"]
    arguments |= ONLY_STEPS
    arguments["max_steps"] = steps
    arguments["default_root_dir"] = str(folder)
