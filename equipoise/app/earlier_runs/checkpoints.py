"""The checkpoint of an earlier run from which a run begins, and how that one was configured."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from equipoise.app.earlier_runs.configurations import differences, flat_configuration
from equipoise.errors import ConfigurationError
from equipoise.formats import format_path
from equipoise.interop.remote.paths import AnyPath, to_path
from equipoise.parallel.shards.reading import ShardReader, is_sharded_checkpoint
from equipoise.trainer.checkpointing.file import newest_first
from equipoise.trainer.checkpointing.file_reading import read_checkpoint
from equipoise.trainer.runtime.best_files import present_place

__all__ = ["EarlierCheckpoint", "changed_values", "find_checkpoint"]

# Parts of a configuration that an evaluation reads, and those that change nothing of what a fit computes.
_EVALUATED = ("data", "module")
_OUTPUT = ("ckpt_path", "hydra", "launcher", "logger", "objective", "output_dir", "stage", "test")


class EarlierCheckpoint(NamedTuple):
    """Checkpoint of an earlier run.

    Attributes:
        path: The checkpoint; None if there is none.
        newer_job: The newest checkpoint of a sweep's job, if it is newer and was passed over.
    """

    path: AnyPath | None
    newer_job: AnyPath | None = None


def find_checkpoint(which: str, values: Mapping[str, Any], *, here_only: bool = False) -> EarlierCheckpoint:
    """Return the newest checkpoint of an earlier run, or the best one of that run.

    The run's folder comes first: it holds checkpoints if the user named it and has used it before. Then come the runs
    in `outputs` in the working folder, without those of another module and those of a `fast_dev_run`. Jobs of sweeps
    are passed over: nobody has chosen their values.

    Args:
        which: "last" or "best".
        values: The configuration of the present run, resolved.
        here_only: Look in the run's folder alone. Default: False.

    Raises:
        ConfigurationError: If the run has no best checkpoint.
    """
    newest = _newest_checkpoint(values, here_only=here_only)
    if newest.path is None or which == "last":
        return newest
    return EarlierCheckpoint(_best_of_run(newest.path), newest.newer_job)


def _newest_checkpoint(values: Mapping[str, Any], *, here_only: bool) -> EarlierCheckpoint:
    # 1. In the run's folder.
    in_folder: list[AnyPath] = [*to_path(values["output_dir"]).glob("**/*.ckpt")]
    for newest in newest_first(in_folder):
        return EarlierCheckpoint(newest)
    if here_only:
        return EarlierCheckpoint(None)

    # 2. In the folders of all runs.
    earlier: list[AnyPath] = []
    for folder in (Path("outputs"), Path("multirun")):
        earlier += folder.glob("**/*.ckpt")
    newer_job = None
    for checkpoint in newest_first(earlier):
        # Sweeps have many jobs, whose configurations take time to read; the newest one is named.
        if newer_job is not None and _is_in_multirun(checkpoint):
            continue
        run = _run_of(checkpoint)
        if run is None or not _may_continue(run.configuration, values):
            continue
        if not run.is_job:
            return EarlierCheckpoint(checkpoint, newer_job)
        newer_job = newer_job or checkpoint
    return EarlierCheckpoint(None, newer_job)


class _Run(NamedTuple):
    """The run that wrote a checkpoint: its configuration, and whether it was a job of a sweep."""

    configuration: Mapping[str, Any]
    is_job: bool


def _run_of(checkpoint: AnyPath) -> _Run | None:
    """Return the run that wrote a checkpoint; None if its configuration cannot be read."""
    for folder in checkpoint.parents:
        file = folder / "config.yaml"
        if not file.is_file():
            continue
        text = file.read_text(encoding="utf-8")
        try:
            configuration = yaml.safe_load(text)
        except yaml.YAMLError:
            # The run was killed while it wrote the file.
            return None
        if not isinstance(configuration, dict):
            return None
        # Only the default of `hydra.sweep.dir` tells a job by its path.
        results_of_sweep = folder.parent / "results.csv"
        is_job = _is_in_multirun(checkpoint) or results_of_sweep.is_file()
        return _Run(configuration, is_job)
    return None


def _is_in_multirun(checkpoint: AnyPath) -> bool:
    return Path("multirun") in checkpoint.parents


def _may_continue(configuration: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Return True if a run is of the present module, and trained in earnest."""
    module = configuration.get("module")
    if not isinstance(module, dict):
        return False
    target: str = values["module"]["_target_"]
    if module.get("_target_") != target:
        return False
    # The user's own callbacks may have written a checkpoint of a few steps.
    trainer = configuration.get("trainer")
    is_in_development = isinstance(trainer, dict) and trainer.get("fast_dev_run")
    return not is_in_development


def _best_of_run(checkpoint: AnyPath) -> AnyPath:
    """Return the best checkpoint of the run that wrote this one.

    Raises:
        ConfigurationError: If it has none.
    """
    file = checkpoint
    if is_sharded_checkpoint(checkpoint):
        file = ShardReader(checkpoint).rest
    content = read_checkpoint(file, values=False)
    reason = "no ModelCheckpoint has noted one"
    # Callbacks that monitor a value come first.
    callbacks = content.get("callbacks") or {}
    ordered = sorted(callbacks.items(), key=lambda item: item[1].get("monitor") is None)
    for key, state in ordered:
        best_path = state.get("best_model_path")
        if not key.startswith("ModelCheckpoint") or not best_path:
            continue
        place = present_place(best_path, state.get("dirpath"), checkpoint)
        if place is not None:
            return to_path(place)
        reason = f"{format_path(best_path)} is gone"
        break
    newest = format_path(str(checkpoint))
    raise ConfigurationError(
        f"ckpt_path=best, but the run that wrote {newest} has no best checkpoint: {reason}."
        " ckpt_path=last takes that file, or give a path."
    )


def changed_values(checkpoint: str, values: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the keys whose values differ from those of the run that wrote a checkpoint, with both values.

    For an evaluation only module and data count, for a fit all that does not merely say what is written where.

    Args:
        checkpoint: The checkpoint; without a configuration beside it, nothing differs.
        values: The configuration of the present run, resolved.
    """
    run = _run_of(to_path(checkpoint))
    if run is None:
        return {}
    is_fit = values["stage"] == "fit"
    before = flat_configuration(run.configuration)
    now = flat_configuration(values)
    changes = {}
    for key, change in differences(before, now).items():
        part = key.partition(".")[0]
        counts = part in _EVALUATED
        if is_fit:
            counts = part not in _OUTPUT
        # A key that another version has in addition is null there.
        if counts and set(change) != {"-", "null"}:
            changes[key] = change
    return changes
