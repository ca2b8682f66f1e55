"""Bench: trials of a configuration, each in a process of its own, with a time limit."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import seed_everything

from equipoise.app.build import build
from equipoise.app.command import PROGRESS
from equipoise.errors import in_one_line
from equipoise.extensions.common.trial_arguments import ONLY_STEPS
from equipoise.parallel.workers.bounded_call import call_bounded

__all__ = ["TIMEOUT", "Bench", "build_data_and_module", "limit_to_steps"]

TIMEOUT = 600.0


class Bench:
    """Runs trials.

    Args:
        folder: Folder for files of all trials.
        folders: The folders with configurations, beside which the user's modules lie.
        timeout: Seconds after which a trial is ended. Default: 600.
        option: The option by which the user sets them, for the message. Default: `--timeout`.
        explain: See `call_bounded`. Default: the type of an error and the first line of its message.

    Attributes:
        folder: The folder.
    """

    def __init__(
        self,
        folder: Path,
        folders: Sequence[Path],
        *,
        timeout: float = TIMEOUT,
        option: str = " (--timeout=SECONDS)",
        explain: Callable[[Exception], str] = in_one_line,
    ) -> None:
        self.folder = folder
        self._paths = [str(folder.parent) for folder in folders]
        self._timeout = timeout
        self._option = option
        self._explain = explain

    def run(self, trial: Callable[..., Any], *arguments: Any) -> Any:
        """Run a trial, a function of a module, and return its result.

        Raises:
            CallError: If it has none; see `call_bounded`.
        """
        return call_bounded(
            trial,
            *arguments,
            timeout=self._timeout,
            paths=self._paths,
            option=self._option,
            explain=self._explain,
            progress=PROGRESS,
        )

    def new_folder(self) -> Path:
        """Return a new folder for the files of a trial."""
        return Path(tempfile.mkdtemp(prefix="trial-", dir=self.folder))


def build_data_and_module(values: dict[str, Any]) -> tuple[Any, Any]:
    """Build the data module, None if there is none, and the module, from the seed of the configuration.

    Args:
        values: The configuration. Without a seed it is 0, since two trials would begin with different weights.
    """
    seed_everything(values["seed"] or 0, workers=True)
    # Data before the module, which may draw random numbers as well.
    data = None
    if values.get("data"):
        data = build(values["data"], "data")
    return data, build(values["module"], "module")


def limit_to_steps(values: dict[str, Any], steps: int, folder: Path) -> None:
    """Change a configuration, so that the trainer takes some optimiser steps and does nothing else."""
    values["trainer"] |= {**ONLY_STEPS, "max_steps": steps, "default_root_dir": str(folder)}
