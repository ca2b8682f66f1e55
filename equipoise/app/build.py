"""Build the objects that a composed configuration names, after all its values are checked."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from equipoise.app.config.checks import check_keys, check_targets
from equipoise.app.earlier_runs.checkpoints import changed_values, find_checkpoint
from equipoise.app.output import is_job_of_sweep
from equipoise.app.torchrun import is_first
from equipoise.errors import ConfigurationError
from equipoise.formats import format_path
from equipoise.interop.remote.paths import is_remote, to_path
from equipoise.parallel.communication.rank import find_rank, slurm_job
from equipoise.tables.width import on_terminal
from equipoise.trainer.checkpointing.file_reading import check_is_file

__all__ = [
    "announce_changes",
    "build",
    "build_trainer",
    "check_loggers",
    "check_values",
    "chosen_checkpoint",
    "overrides",
    "plain_values",
]

# Arguments of the trainer that are groups of their own in the configuration, with the way to choose them.
_GROUPS_OF_THE_TRAINER = {"callbacks": "callbacks=[NAME]", "logger": "logger=[NAME]", "strategy": "strategy=NAME"}
# By class of a logger of Lightning: the package that it needs, and the modules of which one must be there.
_PACKAGES_OF_LOGGERS = {
    "CometLogger": ("comet-ml", ["comet_ml"]),
    "MLFlowLogger": ("mlflow", ["mlflow"]),
    "TensorBoardLogger": ("tensorboard", ["tensorboard", "tensorboardX"]),
    "WandbLogger": ("wandb", ["wandb"]),
}
_DATABASE = "sqlite:///"
# Lines about values that differ from those of a checkpoint's run.
_MOST_CHANGES = 20


def plain_values(config: DictConfig) -> dict[str, Any]:
    """Return a configuration as plain values, with every interpolation resolved.

    Raises:
        ConfigurationError: If a value is missing.
    """
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ConfigurationError(f"{', '.join(missing)} must be given a value, such as {missing[0]}=VALUE.")
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def check_values(values: Mapping[str, Any]) -> None:
    """Check a whole configuration before anything is built: its keys, the targets, and their arguments.

    Raises:
        ConfigurationError: If a key, a `_target_`, or the name or type of an argument is wrong.
    """
    check_keys(values)
    trainer = values["trainer"]
    if isinstance(trainer, dict):
        _check_no_groups(trainer)
    for key, part in _parts(values):
        if not isinstance(part, dict) or "_target_" not in part:
            way_out = _way_out(key, part)
            raise ConfigurationError(
                f"{key} must say what to build, by a _target_ and its arguments; it is {_shown(part)}.{way_out}"
            )
        check_targets(part, key)


def _shown(part: Any) -> str:
    if isinstance(part, dict):
        return f"a mapping with {', '.join(map(str, part)) or 'nothing in it'}"
    return repr(part)


def check_loggers(values: Mapping[str, Any]) -> None:
    """Check that the packages of Lightning's loggers are installed, and that a database of MLflow is a local file.

    Raises:
        ConfigurationError: If not.
    """
    for key, node in _members(values, "logger"):
        module, _, class_name = str(node["_target_"]).rpartition(".")
        if not module.startswith(("lightning.pytorch.", "pytorch_lightning.")):
            continue
        package, modules = _PACKAGES_OF_LOGGERS.get(class_name, ("", []))
        if package and not any(map(find_spec, modules)):
            raise ConfigurationError(
                f"{key} needs {package}, which is not installed: pip install {package}. Or leave it out: logger=csv."
            )
        address = str(node.get("tracking_uri"))
        if not address.startswith(_DATABASE):
            continue
        path = to_path(address.removeprefix(_DATABASE))
        if is_remote(path):
            raise ConfigurationError(
                f"{key}.tracking_uri is a database, which must be a file of this machine, not {address!r}: name a local"
                f" one, or a server, {key}.tracking_uri=http://HOST:PORT {key}.artifact_location=null."
            )


def _way_out(key: str, part: Any) -> str:
    """Return the remedy for a file without its package and for options that are not chosen; empty for other parts."""
    group, _, name = key.partition(".")
    if name == "_target_":
        return f" Its file, conf/{group}/NAME.yaml, must begin with the line `# @package {group}.NAME`."
    if not name or not isinstance(part, dict):
        return ""
    return f" {group}=[...] replaces the whole list: if {name} is an option of the group, name it as well."


def _check_no_groups(trainer: Mapping[str, Any]) -> None:
    for name, way_out in _GROUPS_OF_THE_TRAINER.items():
        if name in trainer:
            raise ConfigurationError(
                f"'trainer.{name}' is not a key of the trainer: {name} is a group of its own, chosen by {way_out},"
                f" and its options are keys below it, as in {name}.NAME.KEY=VALUE."
            )


def _parts(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every part that is built, with its place in the configuration."""
    data = values.get("data")
    if data:
        yield "data", data
    yield "module", values["module"]
    for group in ("callbacks", "logger"):
        members = values[group] or {}
        if not isinstance(members, dict):
            raise ConfigurationError(f"{group} must be a mapping of names to what to build; it is {values[group]!r}.")
        yield from _members(values, group)
    strategy = values["strategy"]
    # A text is the name of a strategy, which the trainer builds.
    if strategy is not None and not isinstance(strategy, str):
        yield "strategy", strategy
    yield "trainer", values["trainer"]
    if values.get("launcher"):
        yield "launcher", values["launcher"]


def _members(values: Mapping[str, Any], group: str) -> Iterator[tuple[str, Any]]:
    """Yield the members of a group with their places, without those that the user has set to null."""
    members = values[group] or {}
    for name, node in members.items():
        if node is not None:
            yield f"{group}.{name}", node


def build(values: Mapping[str, Any], key: str, **more: Any) -> Any:
    """Build the object that a part of the configuration names, from its values and from objects that exist already.

    Args:
        values: The part, as `check_values` has accepted it.
        key: Its place in the configuration.
        more: Further arguments.

    Raises:
        ConfigurationError: If the target cannot be imported or does not take an argument.
    """
    check_targets(values, key, more)
    # A partial function first: Hydra would copy the objects among the further arguments.
    constructor = hydra.utils.instantiate(values, _partial_=True, _convert_="all")
    try:
        return constructor(**more)
    except ConfigurationError as error:
        _name_keys(error, values, key)
        raise


def _name_keys(error: ConfigurationError, values: Mapping[str, Any], key: str) -> None:
    """Add the keys of the arguments that an error is about, as their names in Python lack the part."""
    text = str(error)
    # What a message begins with may be an argument of another part, such as the strategy of a trainer.
    first = re.match(r"(\w+)=", text)
    if first and first[1] not in values:
        return
    named = [name for name in values if re.search(rf"\b{re.escape(name)}\b", text) and f"{key}.{name}" not in text]
    if named:
        error.add_note(f"In the configuration: {', '.join(f'{key}.{name}={values[name]}' for name in named)}.")


def build_trainer(values: Mapping[str, Any], callbacks: Sequence[Any] = ()) -> Any:
    """Build the trainer with its strategy, callbacks and loggers."""
    # 1. The objects that the trainer uses.
    more: dict[str, Any] = {}
    more["callbacks"] = [build(node, key) for key, node in _members(values, "callbacks")]
    more["callbacks"] += callbacks
    more["logger"] = [build(_in_this_rank(node), key) for key, node in _members(values, "logger")]
    # An empty list would mean the trainer's default logger.
    if not more["logger"]:
        more["logger"] = False
    strategy = values["strategy"]
    if isinstance(strategy, str):
        more["strategy"] = strategy
    elif strategy is not None:
        more["strategy"] = build(strategy, "strategy")

    # 2. The trainer itself.
    trainer = dict(values["trainer"])
    if not trainer.get("default_root_dir"):
        trainer["default_root_dir"] = values["output_dir"]
    return build(trainer, "trainer", **more)


def _in_this_rank(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of a logger. All processes of torchrun would create the tables of a database at the same time.

    Those other than the first log nothing, so theirs is in memory.
    """
    rank = find_rank()
    if rank is None or rank.global_rank == 0:
        return node
    address = str(node.get("tracking_uri"))
    if not address.startswith(_DATABASE):
        return node
    return {**node, "tracking_uri": "sqlite:///:memory:"}


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
        # A fit of a sweep continues nothing but its own folder.
        earlier = find_checkpoint(choice, values, here_only=is_job_of_sweep() and values["stage"] == "fit")
        job = "" if earlier.newer_job is None else format_path(str(earlier.newer_job))
        if earlier.path is not None:
            if job:
                announce(
                    f"ckpt_path={choice} passes over jobs of sweeps, though '{job}' is newer; ckpt_path=FILE takes one"
                )
            return str(earlier.path)
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
        check_is_file(to_path(choice))
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
        print(on_terminal(f"equipoise: {message}"), file=sys.stderr)


def overrides(instance: Any, base: type[Any], name: str) -> bool:
    """Return True if the class of an object overrides a method of a base."""
    method = getattr(type(instance), name, None)
    return method is not getattr(base, name, None)
