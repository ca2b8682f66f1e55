"""Sweeps over configurations: the value that a trial returns to the sweeper.

    before the first trial   check_sweep    refuses a sweep that would have no value to return
    after each trial         sweep_value    picks the value out of the metrics of the run

Hydra's own sweeper tries every combination and reads no values. Optuna and others do.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from equipoise.app.config.checks import check_objective, constructor_default
from equipoise.app.config.suggestions import did_you_mean
from equipoise.errors import ConfigurationError, StepError

__all__ = ["check_sweep", "first_trial", "is_sweep", "objectives_of", "reads_values", "sweep_value"]

_FLAGS = ("--multirun", "-m")

# Flags with which Hydra prints something and starts no trial.
_FLAGS_WITHOUT_RUN = ("--cfg", "-c", "--help", "--hydra-help", "--info", "-i")

# Modes of a checkpoint callback, by directions of a sweeper.
_MODES = {"minimize": "min", "maximize": "max"}


def is_sweep(arguments: Sequence[str]) -> bool:
    """Return whether a command line starts a sweep."""
    flags = {argument.partition("=")[0] for argument in arguments}
    if not flags.isdisjoint(_FLAGS_WITHOUT_RUN):
        return False
    return not flags.isdisjoint(_FLAGS)


def first_trial(arguments: Sequence[str], folder: str) -> DictConfig:
    """Compose the first trial of a sweep and check it, before the sweeper is started.

    Args:
        arguments: The overrides and flags of the command line.
        folder: The folder of the primary configuration.

    Returns:
        The configuration of the first trial, Hydra's included.

    Raises:
        ConfigurationError: As `check_sweep`.
        HydraException: If the configuration cannot be composed.
    """
    # 1. The name of the primary configuration: the argument after the flag, or joined to it.
    config_name = "config"
    for argument, next_argument in pairwise([*arguments, ""]):
        if argument in ("--config-name", "-cn"):
            config_name = next_argument
        elif argument.startswith("--config-name="):
            config_name = argument.partition("=")[2]

    # 2. The first trial.
    with hydra.initialize_config_dir(folder, version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        config = loader.load_configuration(config_name, _first_overrides(arguments), run_mode=RunMode.RUN)
    check_sweep(config, config.hydra.sweeper)
    return config


def _first_overrides(arguments: Sequence[str]) -> list[str]:
    """Return the overrides with the first value of each sweep; a range is left out."""
    parser = OverridesParser.create()
    overrides = []
    for argument in arguments:
        if not _is_override(argument):
            continue
        override = parser.parse_override(argument)
        if not override.is_sweep_override():
            overrides.append(argument)
        elif override.is_discrete_sweep():
            key = override.get_key_element()
            first = next(iter(override.sweep_string_iterator()))
            overrides.append(f"{key}={first}")
    return overrides


def _is_override(argument: str) -> bool:
    """Return whether an argument is neither a flag nor the value of a flag."""
    if argument.startswith("-"):
        return False
    return "=" in argument or argument.startswith(("~", "+"))


def check_sweep(config: DictConfig, sweeper: DictConfig | None = None) -> None:
    """Check that a run of a sweep will have the value that the sweeper needs.

    Args:
        config: The configuration of a run of the sweep.
        sweeper: The configuration of the sweeper. Default: that of the running sweep.

    Raises:
        ConfigurationError: If there is no objective, if the sweeper expects another number of them, or if it searches
            in the opposite direction.
    """
    if sweeper is None:
        sweeper = HydraConfig.get().sweeper
    if not reads_values(sweeper):
        return

    # 1. There is an objective.
    objective = config.get("objective")
    if OmegaConf.is_list(objective):
        objective = list(objective)
    check_objective(objective)
    objectives = objectives_of(config)
    if not objectives:
        raise ConfigurationError(
            f"The sweeper {_sweeper_name(sweeper)} chooses a trial by the values that earlier trials returned, but this"
            " run has none to return: objective is null, and no checkpoint callback monitors a value. Name a logged"
            " value, such as objective=val_loss, or monitor one:"
            " callbacks=[model_checkpoint] callbacks.model_checkpoint.monitor=val_loss."
        )

    # 2. The sweeper expects as many, and searches in the right direction.
    directions = _directions(sweeper)
    if not directions:
        return
    if len(directions) != len(objectives):
        raise ConfigurationError(
            f"The sweeper expects one objective for each direction, but hydra.sweeper.direction has {len(directions)}"
            f" ({', '.join(directions)}) and objective has {len(objectives)} ({', '.join(objectives)})."
            " Give both the same length, such as objective=[val_loss,size]"
            " hydra.sweeper.direction=[minimize,minimize]."
        )
    _check_directions(config, objectives, directions)


def _check_directions(config: DictConfig, objectives: Sequence[str], directions: Sequence[str]) -> None:
    """Compare the directions of the sweeper with the modes of checkpoints that monitor the same values."""
    modes = _monitored(config)
    right_directions = [
        _direction_of_mode(modes.get(objective), direction)
        for objective, direction in zip(objectives, directions, strict=True)
    ]

    for objective, direction, right in zip(objectives, directions, right_directions, strict=True):
        # Some sweepers have further directions, which have no mode.
        if direction not in _MODES or direction == right:
            continue
        value = right
        if len(right_directions) > 1:
            value = f"[{','.join(right_directions)}]"
        raise ConfigurationError(
            f"The sweep would {direction} {objective!r}, but a checkpoint callback monitors it with"
            f" mode={_MODES[right]}. Add hydra.sweeper.direction={value}, or change the mode of the callback."
        )


def _direction_of_mode(mode: str | None, default: str) -> str:
    """Return the direction of a sweeper for the mode of a callback, or the default if there is no callback."""
    for direction, direction_mode in _MODES.items():
        if direction_mode == mode:
            return direction
    return default


def sweep_value(config: DictConfig, metrics: Mapping[str, float]) -> float | list[float] | None:
    """Return the value of a finished run by which the sweeper compares runs.

    Returns:
        A number; a list of numbers if `objective` is a list; None if there is no objective.

    Raises:
        ConfigurationError: If the run logged no value of that name.
        StepError: If the value is not finite, and the sweeper reads it.
    """
    objectives = objectives_of(config)
    configured = config.get("objective")
    is_read = reads_values(HydraConfig.get().sweeper)

    # 1. The sweeper needs no value, so the run may have logged none.
    if configured is None and not is_read:
        if not objectives:
            return None
        return metrics.get(objectives[0])

    # 2. The value must exist.
    for name in objectives:
        if name not in metrics:
            hint = did_you_mean(name, metrics)
            raise ConfigurationError(f"The objective of this sweep is {name!r}, but the run logged no such value{hint}")
        value = metrics[name]
        if is_read and not math.isfinite(value):
            raise StepError(
                f"This trial failed: its objective {name!r} ended as {value}, and the sweeper needs a finite"
                " number. Narrow the ranges of the sweep, or let it continue after failed trials"
                " (Optuna: hydra.sweeper.max_failure_rate=0.5)."
            )
    values = [metrics[name] for name in objectives]
    if OmegaConf.is_list(configured):
        return values
    return values[0]


def objectives_of(config: DictConfig) -> list[str]:
    """Return the names of the objectives: the configured ones, or else the value that a checkpoint monitors."""
    objective = config.get("objective")
    if objective is None:
        return list(_monitored(config))[:1]
    if OmegaConf.is_list(objective):
        return list(objective)
    return [str(objective)]


def _monitored(config: DictConfig) -> dict[str, str]:
    """Return the mode of each value that a checkpoint callback monitors, the first callback first."""
    modes: dict[str, str] = {}
    callbacks = config.get("callbacks") or {}
    for node in callbacks.values():
        if not OmegaConf.is_dict(node):
            continue
        target = node.get("_target_")
        if target is None:
            continue
        class_name = target.rpartition(".")[2]
        if not class_name.endswith("Checkpoint"):
            continue
        monitor = _argument(node, "monitor")
        mode = _argument(node, "mode")
        if isinstance(monitor, str):
            modes.setdefault(monitor, mode)
    return modes


def _argument(node: DictConfig, name: str) -> Any:
    """Return the value of an argument: the configured one, or else the constructor's default."""
    if name in node:
        return node[name]
    return constructor_default(node["_target_"], name)


def reads_values(sweeper: DictConfig) -> bool:
    """Return whether a sweeper reads the values of its trials; Hydra's own, and classes derived from it, do not."""
    try:
        sweeper_class = hydra.utils.get_class(sweeper["_target_"])
    except (HydraException, ImportError, ValueError):
        # Hydra raises a better error when it builds the sweeper.
        return False
    return "BasicSweeper" not in [base.__name__ for base in sweeper_class.__mro__]


def _sweeper_name(sweeper: DictConfig) -> str:
    return str(sweeper["_target_"]).rpartition(".")[2]


def _directions(sweeper: DictConfig) -> list[str]:
    """Return the configured directions of a sweeper; empty for one that has no such key."""
    if "direction" not in sweeper:
        return []
    direction = sweeper["direction"]
    if direction is None:
        return []
    directions = [direction]
    if OmegaConf.is_list(direction):
        directions = list(direction)
    # Optuna's directions are members of an enumeration.
    return [getattr(item, "name", str(item)) for item in directions]
