"""Check the arguments of the Trainer, once, when it is made."""

import math
import re
from datetime import timedelta
from difflib import get_close_matches
from typing import Any

from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.classes import is_a

__all__ = [
    "Duration",
    "check_barebones",
    "check_batch_limit",
    "check_choice",
    "check_count",
    "check_flags",
    "check_order",
    "check_patterns",
    "check_val_intervals",
    "gradient_clipping",
    "make_profiler",
    "seconds_of",
]

Duration = str | timedelta | dict[str, int]

_PROFILERS: dict[str, type[Profiler]] = {
    "simple": SimpleProfiler,
    "advanced": AdvancedProfiler,
    "pytorch": PyTorchProfiler,
}


def check_choice(name: str, value: Any, choices: list[str]) -> str:
    """Checks that a value is one of several names.

    Args:
        name: The argument's name.
        value: What was given.
        choices: The allowed names.

    Raises:
        ConfigurationError: Naming the choices and the nearest of them.
    """
    if value in choices:
        return str(value)
    near = get_close_matches(str(value).lower(), choices, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigurationError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}.{hint}")


def check_count(name: str, value: Any, *, least: int, optional: bool = False, unlimited: bool = False) -> Any:
    """Checks an integer.

    Args:
        name: The argument's name.
        value: What was given.
        least: The smallest allowed value.
        optional: Whether None is allowed.
        unlimited: Whether -1 is allowed and means no limit.
    """
    if value is None and optional:
        return value
    if isinstance(value, bool) or not isinstance(value, int) or (value < least and not (unlimited and value == -1)):
        also = ", or -1 for no limit" * unlimited + ", or None" * optional
        raise ConfigurationError(f"{name} must be an integer of at least {least}{also}, not {value!r}.")
    return value


def check_flags(**flags: Any) -> None:
    """Checks that switches, given by name, are True, False, or None where that stands for a default."""
    for name, value in flags.items():
        if value is not None and not isinstance(value, bool):
            raise ConfigurationError(f"{name} must be True or False, not {value!r}.")


def check_batch_limit(name: str, value: Any) -> int | float:
    """Checks a number of batches (int) or a fraction of them (float between 0 and 1); None stands for 1.0.

    Args:
        name: The argument's name.
        value: What was given.
    """
    if value is None:
        return 1.0
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or value < 0
        or (value > 1 and value % 1 != 0)
        or not math.isfinite(value)
    ):
        raise ConfigurationError(
            f"{name} must be a number of batches (an integer from 0) or a fraction (0.0 to 1.0), not {value!r}."
        )
    if value == 1:
        meaning = "one batch" if isinstance(value, int) else "all batches"
        rank_zero_info(f"{name}={value!r} means {meaning}.")
    return int(value) if value > 1 else value


def check_val_intervals(val_check_interval: Any, check_val_every_n_epoch: Any) -> tuple[int | float, float | None]:
    """Checks how often to validate.

    Returns:
        The interval in batches or as a fraction of the epoch, and the interval in seconds, if it was given as a time.
    """
    check_count("check_val_every_n_epoch", check_val_every_n_epoch, least=1, optional=True)
    if isinstance(val_check_interval, (str, timedelta, dict)):
        return 1.0, seconds_of("val_check_interval", val_check_interval)
    if check_val_every_n_epoch is None and (val_check_interval is None or isinstance(val_check_interval, float)):
        raise ConfigurationError(
            "check_val_every_n_epoch=None counts batches over epochs, so val_check_interval must be an integer or"
            f" a time, not {val_check_interval!r}."
        )
    interval = check_batch_limit("val_check_interval", val_check_interval)
    if interval == 0 and val_check_interval is not None:
        raise ConfigurationError(
            "val_check_interval=0 would never validate. Turn validation off with limit_val_batches=0."
        )
    return interval, None


def seconds_of(name: str, value: Duration) -> float:
    """The seconds of a time given as "DD:HH:MM:SS", a timedelta, or a dictionary of timedelta's arguments.

    Args:
        name: The argument's name.
        value: What was given.
    """
    try:
        if isinstance(value, timedelta):
            seconds = value.total_seconds()
        elif isinstance(value, dict):
            seconds = timedelta(**value).total_seconds()
        else:
            match = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", value.strip())
            days, hours, minutes, rest = map(int, match.groups() if match is not None else ())
            seconds = timedelta(days=days, hours=hours, minutes=minutes, seconds=rest).total_seconds()
    except (TypeError, ValueError, AttributeError, OverflowError):
        raise ConfigurationError(
            f"A time for {name} is given as 'DD:HH:MM:SS', a datetime.timedelta or a dictionary such as"
            f" {{'minutes': 30}}, not {value!r}."
        ) from None
    if seconds < 0:
        raise ConfigurationError(f"{name} is a time that has to pass, so it must not be negative, but is {value!r}.")
    return seconds


def gradient_clipping(value: Any, algorithm: Any) -> tuple[float | None, str | None]:
    """Checks the arguments of gradient clipping."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0):
        raise ConfigurationError(f"gradient_clip_val must be a number from 0, or None for no clipping, not {value!r}.")
    if algorithm is not None:
        algorithm = check_choice("gradient_clip_algorithm", str(algorithm).lower(), ["norm", "value"])
    return value, algorithm


def make_profiler(profiler: Profiler | str | None) -> Profiler:
    """The profiler of a name, or the one that was given."""
    if profiler is None:
        return PassThroughProfiler()
    if isinstance(profiler, str):
        return _PROFILERS[check_choice("profiler", profiler.lower(), list(_PROFILERS))]()
    if not is_a(profiler, Profiler):
        raise ConfigurationError(f"profiler must be a name, one of Lightning's profilers, or None, not {profiler!r}.")
    found: Profiler = profiler
    return found


def check_barebones(barebones: bool, given: dict[str, Any]) -> dict[str, Any]:
    """Fills in the arguments whose default depends on `barebones`.

    Args:
        barebones: Whether everything that costs time is off.
        given: Those arguments as they were given, None where they were not.

    Raises:
        ConfigurationError: If `barebones` contradicts another argument.
    """
    switches = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "detect_anomaly")
    check_flags(barebones=barebones, **{name: given[name] for name in switches})
    defaults = {
        "enable_checkpointing": True,
        "logger": True,
        "enable_progress_bar": True,
        "log_every_n_steps": 50,
        "enable_model_summary": True,
        "num_sanity_val_steps": 2,
        "fast_dev_run": False,
        "detect_anomaly": False,
        "detect_nonfinite": None,
        "profiler": None,
    }
    if not barebones:
        return {name: defaults[name] if value is None else value for name, value in given.items()}
    for name, value in given.items():
        if value:
            raise ConfigurationError(
                f"barebones=True turns off everything that costs time, which contradicts {name}={value!r}. Leave"
                " one of them out."
            )
    return {
        name: 0
        if isinstance(defaults[name], int) and not isinstance(defaults[name], bool)
        else defaults[name] and False
        for name in given
    }


def check_order(least: int | None, most: int | None, what: str) -> None:
    """Checks that `min_*` does not exceed `max_*`."""
    if least is not None and most is not None and 0 <= most < least:
        raise ConfigurationError(f"min_{what}={least} exceeds max_{what}={most}. Lower the one or raise the other.")


def check_patterns(name: str, value: Any) -> list[str]:
    """Checks a list of names; None stands for an empty one.

    Args:
        name: The argument's name.
        value: What was given.
    """
    if value is None:
        return []
    if isinstance(value, str):
        raise ConfigurationError(f"{name} takes a list of names, such as [{value!r}], not {value!r}.")
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) and item for item in value):
        raise ConfigurationError(f"{name} must be a list of names or patterns of submodules, not {value!r}.")
    return list(value)
