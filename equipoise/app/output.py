"""The output folder of a run: its files, and the checkpoints in folders of earlier runs."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from equipoise.interop.remote.paths import AnyPath, to_path
from equipoise.parallel.shards.reading import ShardReader, is_sharded_checkpoint
from equipoise.trainer.checkpointing.file import newest_first, read_checkpoint, time_of
from equipoise.trainer.logging.csv_rows import put_aside

__all__ = ["find_checkpoint", "is_job_of_sweep", "keep_metrics", "remove_if_empty", "without_empty_folder"]


def is_job_of_sweep() -> bool:
    """Return True in a job of a sweep, whichever process runs it."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def find_checkpoint(which: str, values: Mapping[str, Any]) -> AnyPath | None:
    """Return the newest checkpoint of an earlier run, or the best one of that run.

    The run's folder comes first: it holds checkpoints if the user named it and has used it before. Then come the
    folders `outputs` and `multirun` in the working folder, without runs of another module. A fit of a sweep continues
    nothing but its own folder: runs elsewhere have other values.

    Args:
        which: "last" or "best".
        values: The configuration of the present run, resolved.

    Returns:
        The checkpoint, or None if there is none.
    """
    newest = _newest_checkpoint(values)
    if newest is None or which == "last":
        return newest
    return _best_of_run(newest) or newest


def _newest_checkpoint(values: Mapping[str, Any]) -> AnyPath | None:
    # 1. In the run's folder.
    output = to_path(values["output_dir"])
    found: list[AnyPath] = [*output.glob("**/*.ckpt")]
    checkpoints = newest_first(found)
    if checkpoints:
        return checkpoints[0]
    if is_job_of_sweep() and values["stage"] == "fit":
        return None

    # 2. In the folders of all runs.
    earlier: list[AnyPath] = []
    for folder in (Path("outputs"), Path("multirun")):
        earlier += folder.glob("**/*.ckpt")
    for checkpoint in newest_first(earlier):
        if _is_of_same_module(checkpoint, values):
            return checkpoint
    return None


def _is_of_same_module(checkpoint: AnyPath, values: Mapping[str, Any]) -> bool:
    module = _module_of_run(checkpoint)
    if not isinstance(module, dict):
        return False
    target: str = values["module"]["_target_"]
    return module.get("_target_") == target


def _module_of_run(checkpoint: AnyPath) -> Any:
    """Return the configuration of the module in the run that wrote a checkpoint; None if it cannot be read."""
    files = [folder / "config.yaml" for folder in checkpoint.parents]
    for file in files:
        if not file.is_file():
            continue
        text = file.read_text(encoding="utf-8")
        try:
            config = yaml.safe_load(text)
        except yaml.YAMLError:
            # The run was killed while it wrote the file.
            return None
        if isinstance(config, dict):
            return config.get("module")
        return None
    return None


def _best_of_run(checkpoint: AnyPath) -> AnyPath | None:
    """Return the best checkpoint of the run that wrote this one, if it still exists."""
    file = checkpoint
    if is_sharded_checkpoint(checkpoint):
        file = ShardReader(checkpoint).rest
    content = read_checkpoint(file, values=False)
    callbacks = content.get("callbacks", {}).items()
    # Callbacks that monitor a value come first.
    for key, state in sorted(callbacks, key=lambda item: item[1].get("monitor") is None):
        best_path = state.get("best_model_path")
        if not key.startswith("ModelCheckpoint") or not best_path:
            continue
        # The user may have moved the folder, so only the name of the file counts.
        best = checkpoint.parent / Path(best_path).name
        if time_of(best) is not None:
            return best
        return None
    return None


def keep_metrics(output: AnyPath) -> None:
    """Rename the metrics of an earlier run in the same folder, which the CSV logger would delete.

    Args:
        output: The folder; `metrics.csv` becomes `metrics_0.csv`, or the next number that is free.
    """
    metrics = output / "metrics.csv"
    if metrics.exists():
        put_aside(metrics)


@contextlib.contextmanager
def without_empty_folder(output: Path) -> Iterator[None]:
    """Remove the folder of a run that is refused before it begins, if it is empty.

    Hydra creates the folder before it calls the task. Folders above it, such as that of the day, are removed if they
    are empty, too. The folder of a job of a sweep stays: its launcher may log there after the job.
    """
    try:
        yield
    except Exception:
        if not is_job_of_sweep():
            remove_if_empty(output)
        raise


def remove_if_empty(folder: Path) -> None:
    """Remove a folder, and those above it, as far as they are empty, up to the working folder."""
    working_folder = Path.cwd()
    folder = folder.absolute()
    # The first folder that is not empty raises an error, which ends the loop.
    with contextlib.suppress(OSError):
        while working_folder in folder.parents:
            folder.rmdir()
            folder = folder.parent
