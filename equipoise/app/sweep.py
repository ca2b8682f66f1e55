"""Sweeps over configurations: the value that a trial returns to the sweeper.

    before the first trial   check_sweep    refuses a sweep that would have no value to return
    after each trial         sweep_value    picks the value out of the metrics of the run

Hydra's own sweeper tries every combination and reads no values. Optuna and others do.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from equipoise.app.config.checks import check_objective, constructor_default, did_you_mean
from equipoise.errors import ConfigurationError, StepError

__all__ = ["check_first_trial", "check_sweep", "is_sweep", "sweep_value"]

_FLAGS = ("--multirun", "-m")
_FLAGS_WITHOUT_RUN = ("--cfg", "-c", "--help", "--hydra-help", "--info", "-i")  # they print, and start no trial
_MODES = {"minimize": "min", "maximize": "max"}


def is_sweep(arguments: Sequence[str]) -> bool:
    """Return whether a command line starts a sweep."""
    flags = {argument.partition("=")[0] for argument in arguments}
    return not flags.isdisjoint(_FLAGS) and flags.isdisjoint(_FLAGS_WITHOUT_RUN)


def check_first_trial(arguments: Sequence[str], folder: str, config_name: str) -> None:
    """Compose the first trial of a sweep and check it, before the sweeper is started.

    Args:
        arguments: The overrides and flags of the command line.
        folder: The folder of the primary configuration.
        config_name: The name of the primary configuration, if no flag names another.

    Raises:
        ConfigurationError: As `check_sweep`.
        HydraException: If the configuration cannot be composed.
    """
    for argument, following in pairwise([*arguments, ""]):
        if argument in ("--config-name", "-cn"):
            config_name = following
        elif argument.startswith("--config-name="):
            config_name = argument.partition("=")[2]
    with hydra.initialize_config_dir(folder, version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        overrides = _first_overrides(arguments)
        config = loader.load_configuration(config_name, overrides, run_mode=RunMode.RUN)
    check_sweep(config, config.hydra.sweeper)


def _first_overrides(arguments: Sequence[str]) -> list[str]:
    """Return the overrides with the first value of each sweep; a range is left out."""
    parser = OverridesParser.create()
    overrides = []
    for argument in arguments:
        if argument.startswith("-") or ("=" not in argument and argument[:1] not in ("~", "+")):
            continue  # a flag, or the value of a flag
        override = parser.parse_override(argument)
        if not override.is_sweep_override():
            overrides.append(argument)
        elif override.is_discrete_sweep():
            first = next(iter(override.sweep_string_iterator()))
            overrides.append(f"{override.get_key_element()}={first}")
    return overrides


def check_sweep(config: DictConfig, sweeper: DictConfig | None = None) -> None:
    """Check that a run of a sweep will have the value that the sweeper asks for.

    Args:
        config: The configuration of a run of the sweep.
        sweeper: The configuration of the sweeper. Default: that of the running sweep.

    Raises:
        ConfigurationError: If there is no objective, if the sweeper expects another number of them, or if it searches
            in the opposite direction.
    """
    sweeper = HydraConfig.get().sweeper if sweeper is None else sweeper
    if not _reads_values(sweeper):
        return
    objective = config.get("objective")
    check_objective(list(objective) if OmegaConf.is_list(objective) else objective)
    objectives = _objectives(config)
    if not objectives:
        raise ConfigurationError(
            f"The sweeper {_sweeper_name(sweeper)} chooses a trial by the values that earlier trials returned, but this"
            " run has none to return: objective is null, and no checkpoint callback monitors a value. Name a logged"
            " value, such as objective=val_loss, or monitor one:"
            " callbacks=[model_checkpoint] callbacks.model_checkpoint.monitor=val_loss."
        )
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
    wanted = []
    for objective, direction in zip(objectives, directions, strict=True):
        mode = modes.get(objective)
        wanted.append(next((word for word in _MODES if _MODES[word] == mode), direction))
    for objective, direction, right in zip(objectives, directions, wanted, strict=True):
        if direction in _MODES and direction != right:
            value = f"[{','.join(wanted)}]" if len(wanted) > 1 else right
            raise ConfigurationError(
                f"The sweep would {direction} {objective!r}, but a checkpoint callback monitors it with"
                f" mode={_MODES[right]}. Add hydra.sweeper.direction={value}, or change the mode of the callback."
            )


def sweep_value(config: DictConfig, metrics: Mapping[str, float]) -> float | list[float] | None:
    """Return the value of a finished run that the sweeper goes by.

    Args:
        config: The configuration of the run.
        metrics: The metrics that the run ended with.

    Returns:
        A number; a list of numbers where `objective` is a list; None if there is no objective.

    Raises:
        ConfigurationError: If the run logged no value of that name.
        StepError: If the value is not finite, and the sweeper reads it.
    """
    objectives = _objectives(config)
    reads_values = _reads_values(HydraConfig.get().sweeper)
    if config.get("objective") is None and not reads_values:
        return metrics.get(objectives[0]) if objectives else None
    for name in objectives:
        if name not in metrics:
            hint = did_you_mean(name, metrics)
            raise ConfigurationError(f"The objective of this sweep is {name!r}, but the run logged no such value{hint}")
        if reads_values and not math.isfinite(metrics[name]):
            raise StepError(
                f"This trial failed: its objective {name!r} ended as {metrics[name]}, and the sweeper needs a finite"
                " number. Narrow the ranges of the sweep, or let it go on after failed trials"
                " (Optuna: hydra.sweeper.max_failure_rate=0.5)."
            )
    values = [metrics[name] for name in objectives]
    return values if OmegaConf.is_list(config.get("objective")) else values[0]


def _objectives(config: DictConfig) -> list[str]:
    """Return the names of the values that the sweep goes by: those configured, or what a checkpoint monitors."""
    objective = config.get("objective")
    if objective is None:
        return list(_monitored(config))[:1]
    return list(objective) if OmegaConf.is_list(objective) else [str(objective)]


def _monitored(config: DictConfig) -> dict[str, str]:
    """Return the mode of each value that a checkpoint callback monitors, the first callback first."""
    modes: dict[str, str] = {}
    callbacks = config.get("callbacks") or {}
    for node in callbacks.values():
        target = node.get("_target_") if OmegaConf.is_dict(node) else None
        if target is None or not target.rpartition(".")[2].endswith("Checkpoint"):
            continue
        monitor = node["monitor"] if "monitor" in node else constructor_default(target, "monitor")
        mode = node["mode"] if "mode" in node else constructor_default(target, "mode")
        if isinstance(monitor, str):
            modes.setdefault(monitor, mode)
    return modes


def _reads_values(sweeper: DictConfig) -> bool:
    """Return whether a sweeper reads what its trials return; Hydra's own, and what derives from it, does not."""
    try:
        sweeper_class = hydra.utils.get_class(sweeper["_target_"])
    except (HydraException, ImportError, ValueError):
        return False  # Hydra explains it better when it builds the sweeper
    return all(base.__name__ != "BasicSweeper" for base in sweeper_class.__mro__)


def _sweeper_name(sweeper: DictConfig) -> str:
    return str(sweeper["_target_"]).rpartition(".")[2]


def _directions(sweeper: DictConfig) -> list[str]:
    """Return the directions that a sweeper is configured with; empty for one that has no such key."""
    if "direction" not in sweeper or sweeper["direction"] is None:
        return []
    direction = sweeper["direction"]
    several = list(direction) if OmegaConf.is_list(direction) else [direction]
    return [getattr(item, "name", str(item)) for item in several]
