"""The checkpoint of an earlier run from which a run begins, and how that one was configured."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from equipoise.app.earlier_runs.configurations import differences, flat_configuration
from equipoise.app.output import is_job_of_sweep
from equipoise.app.torchrun import is_first
from equipoise.errors import ConfigurationError
from equipoise.formats import format_path
from equipoise.interop.remote.paths import AnyPath, to_path
from equipoise.parallel.communication.rank import find_rank, slurm_job
from equipoise.parallel.shards.reading import ShardReader, is_sharded_checkpoint
from equipoise.trainer.checkpointing.best_files import present_place
from equipoise.trainer.checkpointing.file import check_is_file, newest_first, read_checkpoint

__all__ = ["Found", "announce_changes", "changed_values", "chosen_checkpoint", "find_checkpoint"]

# Parts of a configuration that an evaluation reads, and those that change nothing of what a fit computes.
_EVALUATED = ("data", "module")
_OUTPUT = ("ckpt_path", "hydra", "launcher", "logger", "objective", "output_dir", "stage", "test")
# Lines about values that differ.
_MOST_CHANGES = 20


def chosen_checkpoint(values: Mapping[str, Any]) -> str | None:
    """Return the checkpoint that a run begins from.

    "best" and "last" mean checkpoints of an earlier run, as this one has none yet.

    Returns:
        A path; None for no checkpoint; "last" if there is no earlier run of a job that a launcher may start again.

    Raises:
        ConfigurationError: If no earlier run left a checkpoint.
        CheckpointError: If the path is not that of a file.
    """
    choice: str | None = values["ckpt_path"]
    if choice in ("best", "last"):
        found = find_checkpoint(choice, values)
        job = "" if found.newer_job is None else format_path(str(found.newer_job))
        if found.path is not None:
            if job:
                announce(
                    f"ckpt_path={choice} passes over jobs of sweeps, though {job} is newer; ckpt_path='{job}' takes it"
                )
            return str(found.path)
        # torchrun, Slurm and Ray start a program again after a failure, by the same command as the first time. A sweep
        # that continues has jobs that had not begun.
        is_started_again = find_rank() is not None or slurm_job() is not None or bool(values.get("launcher"))
        may_be_repeated = is_started_again or is_job_of_sweep()
        if values["stage"] == "fit" and choice == "last" and may_be_repeated:
            return choice
        way_out = "Give a path."
        if values["stage"] == "fit":
            way_out = "Leave ckpt_path out to begin a new run, or give a path."
        if job:
            way_out += f" The newest of a job of a sweep is '{job}'."
        raise ConfigurationError(
            f"ckpt_path={choice}, but no earlier run of this module left a checkpoint under outputs. {way_out}"
        )
    if isinstance(choice, str):
        check_is_file(choice)
    return choice


def announce_changes(checkpoint: str, values: Mapping[str, Any]) -> None:
    """Name each value that differs from those of the run that wrote a checkpoint."""
    changes = changed_values(checkpoint, values)
    if not changes:
        return
    lines = [f"  {key}: {before} -> {after}" for key, (before, after) in changes.items()]
    if len(lines) > _MOST_CHANGES:
        lines[_MOST_CHANGES:] = [f"  and {len(lines) - _MOST_CHANGES} more"]
    if values["stage"] == "fit":
        lines.append("  Optimisers and schedulers continue as they were, with the learning rate of the checkpoint.")
    announce("\n".join([f"other values than those of the run that wrote {format_path(checkpoint)}:", *lines]))


def announce(message: str) -> None:
    """Print a line about the run to the error output, in the process that writes its files."""
    if is_first():
        print(f"equipoise: {message}", file=sys.stderr)


class Found(NamedTuple):
    """Checkpoint of an earlier run.

    Attributes:
        path: The checkpoint; None if there is none.
        newer_job: The newest checkpoint of a sweep's job, if it is newer and was passed over.
    """

    path: AnyPath | None
    newer_job: AnyPath | None = None


def find_checkpoint(which: str, values: Mapping[str, Any]) -> Found:
    """Return the newest checkpoint of an earlier run, or the best one of that run.

    The run's folder comes first: it holds checkpoints if the user named it and has used it before. Then come the runs
    in `outputs` in the working folder, without those of another module and those of a `fast_dev_run`. Jobs of sweeps
    are passed over: nobody has chosen their values. A fit of a sweep continues nothing but its own folder.

    Args:
        which: "last" or "best".
        values: The configuration of the present run, resolved.

    Raises:
        ConfigurationError: If the run has no best checkpoint.
    """
    found = _newest_checkpoint(values)
    if found.path is None or which == "last":
        return found
    return Found(_best_of_run(found.path), found.newer_job)


def _newest_checkpoint(values: Mapping[str, Any]) -> Found:
    # 1. In the run's folder.
    output = to_path(values["output_dir"])
    own: list[AnyPath] = [*output.glob("**/*.ckpt")]
    checkpoints = newest_first(own)
    if checkpoints:
        return Found(checkpoints[0])
    if is_job_of_sweep() and values["stage"] == "fit":
        return Found(None)

    # 2. In the folders of all runs.
    earlier: list[AnyPath] = []
    for folder in (Path("outputs"), Path("multirun")):
        earlier += folder.glob("**/*.ckpt")
    newer_job = None
    for checkpoint in newest_first(earlier):
        run = _run_of(checkpoint)
        if run is None or not _may_continue(run.configuration, values):
            continue
        if not run.is_job:
            return Found(checkpoint, newer_job)
        newer_job = newer_job or checkpoint
    return Found(None, newer_job)


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
        is_job = Path("multirun") in checkpoint.parents or (folder.parent / "results.csv").is_file()
        return _Run(configuration, is_job)
    return None


def _may_continue(configuration: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Return True if a run is of the present module, and trained in earnest."""
    module = configuration.get("module")
    if not isinstance(module, dict) or module.get("_target_") != values["module"]["_target_"]:
        return False
    trainer = configuration.get("trainer")
    return not (isinstance(trainer, dict) and trainer.get("fast_dev_run"))


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
    callbacks = (content.get("callbacks") or {}).items()
    # Callbacks that monitor a value come first.
    for key, state in sorted(callbacks, key=lambda item: item[1].get("monitor") is None):
        best_path = state.get("best_model_path")
        if not key.startswith("ModelCheckpoint") or not best_path:
            continue
        place = present_place(best_path, state.get("dirpath"), checkpoint)
        if place is not None:
            return to_path(place)
        reason = f"{format_path(best_path)} is gone"
        break
    raise ConfigurationError(
        f"ckpt_path=best, but the run that wrote {format_path(str(checkpoint))} has no best checkpoint: {reason}."
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
    flat = [flat_configuration(configuration) for configuration in (run.configuration, values)]
    changes = {}
    for key, (before, after) in differences(*flat).items():
        part = key.partition(".")[0]
        counts = part in _EVALUATED if values["stage"] != "fit" else part not in _OUTPUT
        # A key that another version has in addition is null there.
        if counts and {before, after} != {"-", "null"}:
            changes[key] = (before, after)
    return changes
