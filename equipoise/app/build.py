"""Build the objects that a composed configuration names, after all its values are checked."""

from collections.abc import Iterator, Mapping
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from equipoise.app.config.checks import check_keys, check_targets
from equipoise.app.output import find_checkpoint
from equipoise.errors import ConfigurationError
from equipoise.trainer.checkpointing.file import check_is_file

__all__ = ["build", "build_trainer", "check_values", "chosen_checkpoint", "overrides", "plain_values"]

# What the trainer takes and the configuration has as a group of its own.
_GROUPS_OF_THE_TRAINER = {"callbacks": "callbacks=[NAME]", "logger": "logger=[NAME]", "strategy": "strategy=NAME"}
_PACKAGES_OF_LOGGERS = {
    "CometLogger": "comet-ml",
    "MLFlowLogger": "mlflow",
    "TensorBoardLogger": "tensorboard",
    "WandbLogger": "wandb",
}


def plain_values(config: DictConfig) -> dict[str, Any]:
    """Return a configuration as plain values, with every interpolation resolved.

    Args:
        config: The composed configuration.

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
    """Check a whole configuration before anything is built: its keys, what it names, and the arguments beside it.

    Args:
        values: The configuration, as `plain_values` returns it.

    Raises:
        ConfigurationError: If a key, a `_target_`, or the name or type of an argument is wrong.
    """
    check_keys(values)
    trainer = values["trainer"]
    if isinstance(trainer, dict):
        for name, way_out in _GROUPS_OF_THE_TRAINER.items():
            if name in trainer:
                raise ConfigurationError(
                    f"'trainer.{name}' is not a key of the trainer: {name} is a group of its own, chosen by {way_out},"
                    f" and its options are keys below it, as in {name}.NAME.KEY=VALUE."
                )
    for key, part in _parts(values):
        if not isinstance(part, dict) or "_target_" not in part:
            raise ConfigurationError(f"{key} must say what to build, by a _target_ and its arguments; it is {part!r}.")
        check_targets(part, key)


def _parts(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every part that is built, under its place in the configuration."""
    if values.get("data"):
        yield "data", values["data"]
    yield "module", values["module"]
    for group in ("callbacks", "logger"):
        members = values[group] or {}
        if not isinstance(members, dict):
            raise ConfigurationError(f"{group} must be a mapping of names to what to build; it is {values[group]!r}.")
        yield from ((f"{group}.{name}", node) for name, node in members.items() if node is not None)
    if values["strategy"] is not None and not isinstance(values["strategy"], str):
        yield "strategy", values["strategy"]
    yield "trainer", values["trainer"]


def build(values: Mapping[str, Any], key: str, **more: Any) -> Any:
    """Build what a part of the configuration names, from its values and from objects that exist already.

    Args:
        values: The part, as `check_values` has accepted it.
        key: Its place in the configuration.
        more: Further arguments.

    Raises:
        ConfigurationError: If the target cannot be imported or does not take an argument.
    """
    check_targets(values, key, more)
    try:
        return hydra.utils.instantiate(values, _partial_=True, _convert_="all")(**more)
    except ModuleNotFoundError as error:
        package = _PACKAGES_OF_LOGGERS.get(values["_target_"].rpartition(".")[2])
        if package is None:
            raise
        raise ConfigurationError(
            f"{key} needs {package}, which is not installed: pip install {package}. Or leave it out: logger=csv."
        ) from error


def build_trainer(values: Mapping[str, Any]) -> Any:
    """Build the trainer with its strategy, callbacks and loggers.

    Args:
        values: The whole configuration, as `check_values` has accepted it.
    """
    strategy = values["strategy"]
    more: dict[str, Any] = {}
    for group in ("callbacks", "logger"):
        members = (values[group] or {}).items()
        more[group] = [build(node, f"{group}.{name}") for name, node in members if node is not None]
    more["logger"] = more["logger"] or False
    if isinstance(strategy, str):
        more["strategy"] = strategy
    elif strategy is not None:
        more["strategy"] = build(strategy, "strategy")
    trainer = dict(values["trainer"])
    trainer["default_root_dir"] = trainer.get("default_root_dir") or values["output_dir"]
    return build(trainer, "trainer", **more)


def chosen_checkpoint(values: Mapping[str, Any]) -> str | None:
    """Return the checkpoint that a run begins from.

    "best" and "last" are those of an earlier run, since this one has none yet.

    Args:
        values: The whole configuration.

    Returns:
        A path; "last" where `fit` finds no earlier run, which the trainer warns of; None for none.

    Raises:
        ConfigurationError: If no earlier run left a checkpoint to evaluate.
        CheckpointError: If the path is not that of a file.
    """
    which: str | None = values["ckpt_path"]
    if which in ("best", "last"):
        found = find_checkpoint(which, values)
        if found is None and values["stage"] != "fit":
            raise ConfigurationError(
                f"ckpt_path={which}, but no earlier run of this module left a checkpoint under outputs. Give a path."
            )
        return which if found is None else str(found)
    if isinstance(which, str):
        check_is_file(which)
    return which


def overrides(instance: Any, base: type[Any], name: str) -> bool:
    """Return whether the class of an object has a method of its own in place of that of a base."""
    return getattr(type(instance), name, None) is not getattr(base, name, None)
