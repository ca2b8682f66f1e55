"""The output folder of a run, and its files."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from equipoise.errors import ConfigurationError
from equipoise.interop.remote.paths import AnyPath
from equipoise.trainer.checkpointing.file import completion_time
from equipoise.trainer.logging.csv_rows import put_aside

__all__ = ["begun_folder", "cannot_be_made", "is_job_of_sweep", "remove_if_empty", "without_empty_folder"]

# A logger writes it before the first step.
_HYPERPARAMETERS = "hparams.yaml"


def is_job_of_sweep() -> bool:
    """Return True in a job of a sweep, whichever process runs it."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def cannot_be_made(error: OSError, key: str) -> str:
    """Return the message about a folder of a run that the operating system refuses.

    Args:
        error: The refusal.
        key: The key that names the folder.
    """
    reason = f"{error.filename}: {error.strerror}" if error.strerror else str(error)
    return f"The folder of the run cannot be made ({reason}). Name another, as in {key}=FOLDER."


@contextlib.contextmanager
def begun_folder(output: AnyPath, values: Mapping[str, Any]) -> Iterator[None]:
    """Write the configuration of the run in the block; a run that fails before it has left anything leaves none.

    Metrics of an earlier run in the same folder, which the CSV logger would delete, are put aside: `metrics.csv`
    becomes `metrics_0.csv`, or the next number that is free.

    Args:
        output: The folder of the run.
        values: Its configuration in plain values.
    """
    # 1. What an earlier run has left there.
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(cannot_be_made(error, "output_dir")) from error
    configuration, metrics = output / "config.yaml", output / "metrics.csv"
    earlier = configuration.read_text(encoding="utf-8") if configuration.is_file() else None
    # A resumed run appends to the metrics of the earlier one; all others begin a new file.
    begins_anew = values["stage"] != "fit" or values["ckpt_path"] in (None, "last", "best")
    aside = put_aside(metrics) if begins_anew and metrics.exists() else None

    # 2. This run. A job of a sweep stays: the results of the sweep say how it has ended.
    text = OmegaConf.to_yaml(OmegaConf.create(dict(values)))
    configuration.write_text(text, encoding="utf-8")
    before = _entries(output)
    try:
        yield
    except BaseException:
        if _entries(output) == before and not is_job_of_sweep():
            if aside is not None:
                aside.rename(metrics)
            _put_back(configuration, earlier)
        raise


def _entries(folder: AnyPath) -> dict[str, int | None]:
    """Return the entries of a folder with their times, without what a run writes before it begins."""
    entries: list[AnyPath] = [*folder.iterdir()]
    return {
        entry.name: completion_time(entry)
        for entry in entries
        if entry.name != _HYPERPARAMETERS and not entry.name.endswith(".log")
    }


def _put_back(configuration: AnyPath, earlier: str | None) -> None:
    """Leave the folder of a run as it was before."""
    if earlier is not None:
        configuration.write_text(earlier, encoding="utf-8")
        return
    for path in (configuration, configuration.parent / _HYPERPARAMETERS):
        if path.is_file():
            path.unlink()


@contextlib.contextmanager
def without_empty_folder(output: Path) -> Iterator[None]:
    """Remove the folder of a run if it is empty at the end, as that of a run that is refused before it begins.

    Hydra creates the folder before it calls the task. Folders above it, such as that of the day, are removed if they
    are empty, too. The folder of a job of a sweep stays: its launcher may log there after the job.
    """
    try:
        yield
    finally:
        if not is_job_of_sweep():
            remove_if_empty(output)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder, and those above it, as far as they are empty, up to the working folder."""
    working_folder = Path.cwd()
    folder = folder.absolute()
    # The first folder that is not empty raises an error, which ends the loop.
    with contextlib.suppress(OSError):
        while working_folder in folder.parents:
            folder.rmdir()
            folder = folder.parent
