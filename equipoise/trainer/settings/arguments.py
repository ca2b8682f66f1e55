"""Check the arguments of the Trainer, once, in its constructor.

Each check takes the name of an argument and its value, and raises a ConfigurationError that names both.
"""

import math
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from equipoise.errors import ConfigurationError, ConfigurationTypeError
from equipoise.interop.lightning.classes import is_a
from equipoise.interop.remote.paths import to_path
from equipoise.validation import is_number, is_whole

__all__ = [
    "Duration",
    "check_auto_flag",
    "check_barebones",
    "check_batch_limit",
    "check_choice",
    "check_compile_options",
    "check_count",
    "check_flag",
    "check_flags",
    "check_order",
    "check_patterns",
    "check_size",
    "check_val_intervals",
    "gradient_clipping",
    "make_profiler",
    "root_directory",
    "seconds_of",
]

Duration = str | timedelta | dict[str, int]

_PROFILERS: dict[str, type[Profiler]] = {
    "simple": SimpleProfiler,
    "advanced": AdvancedProfiler,
    "pytorch": PyTorchProfiler,
}


def check_choice(name: str, value: Any, choices: list[str]) -> str:
    """Return a value that is one of several names; the error names the choices, and the nearest of them."""
    if value in choices:
        return str(value)
    hint = ""
    matches = get_close_matches(str(value).lower(), choices, n=1)
    if matches:
        hint = f" Did you mean {matches[0]!r}?"
    options = ", ".join(map(repr, choices))
    raise ConfigurationError(f"{name} must be one of {options}, not {value!r}.{hint}")


def check_count(name: str, value: Any, *, least: int, optional: bool = False, unlimited: bool = False) -> Any:
    """Return an integer that is not too small.

    Args:
        name: The argument's name.
        value: Its value.
        least: The smallest allowed value.
        optional: Whether None is allowed. Default: False.
        unlimited: Whether -1 is allowed and means no limit. Default: False.
    """
    # 1. Allowed values.
    if value is None and optional:
        return value
    if is_whole(value):
        if value >= least:
            return value
        if value == -1 and unlimited:
            return value

    # 2. All others.
    alternatives = ""
    if unlimited:
        alternatives += ", or -1 for no limit"
    if optional:
        alternatives += ", or None"
    raise ConfigurationError(f"{name} must be an integer of at least {least}{alternatives}, not {value!r}.")


def check_flags(**flags: Any) -> None:
    """Check that switches, by the names of their arguments, are True or False, or None for a default."""
    for name, value in flags.items():
        if value is not None:
            check_flag(name, value)


def check_flag(name: str, value: Any) -> bool:
    """Return a switch that must be True or False."""
    if isinstance(value, bool):
        return value
    raise ConfigurationError(f"{name} must be True or False, not {value!r}.")


def check_size(name: str, value: Any) -> int:
    """Return a number of bytes that stands in place of a switch: a whole number from 0."""
    if is_whole(value, least=0):
        return int(value)
    raise ConfigurationError(f"{name} must be True, False or a number of bytes from 0, not {value!r}.")


def check_batch_limit(name: str, value: Any) -> int | float:
    """Return a number of batches, an integer if it exceeds 1, or a fraction of them (0.0 to 1.0); None means 1.0."""
    if value is None:
        return 1.0
    if not _is_batch_limit(value):
        raise ConfigurationError(
            f"{name} must be a number of batches (an integer from 0) or a fraction (0.0 to 1.0), not {value!r}."
        )
    # 1 and 1.0 are easily confused.
    if value == 1:
        meaning = "one batch" if isinstance(value, int) else "all batches"
        rank_zero_info(f"{name}={value!r} means {meaning}.")
    # 2.0 is a number of batches as well.
    return int(value) if value > 1 else value


def _is_batch_limit(value: Any) -> bool:
    # Texts cannot be compared with numbers.
    if not is_number(value):
        return False
    if value < 0 or not math.isfinite(value):
        return False
    return value <= 1 or float(value).is_integer()


def check_val_intervals(val_check_interval: Any, check_val_every_n_epoch: Any) -> tuple[int | float, float | None]:
    """Check the interval of validations.

    Args:
        val_check_interval: A number of batches, a fraction of the epoch, a time, or None.
        check_val_every_n_epoch: A number of epochs; None: batches are counted over epochs.

    Returns:
        The interval in batches or as a fraction of the epoch, and the interval in seconds, if it is a time.

    Raises:
        ConfigurationError: If a value is wrong, or the two contradict each other.
    """
    check_count("check_val_every_n_epoch", check_val_every_n_epoch, least=1, optional=True)

    # 1. A time.
    if isinstance(val_check_interval, str | timedelta | dict):
        return 1.0, seconds_of("val_check_interval", val_check_interval)

    # 2. A fraction of the epoch needs an epoch.
    is_fraction = val_check_interval is None or isinstance(val_check_interval, float)
    if check_val_every_n_epoch is None and is_fraction:
        raise ConfigurationError(
            "check_val_every_n_epoch=None counts batches over epochs, so val_check_interval must be an integer or"
            f" a time, not {val_check_interval!r}."
        )

    # 3. A number of batches, or a fraction.
    interval = check_batch_limit("val_check_interval", val_check_interval)
    if interval == 0 and val_check_interval is not None:
        raise ConfigurationError(
            "val_check_interval=0 would never validate. Turn validation off with limit_val_batches=0."
        )
    return interval, None


def seconds_of(name: str, value: Duration) -> float:
    """Return a time from 0 in seconds: of "DD:HH:MM:SS", a timedelta, or a dictionary of its arguments."""
    try:
        if isinstance(value, timedelta):
            duration = value
        elif isinstance(value, dict):
            duration = timedelta(**value)
        else:
            duration = _parse_duration(value)
        seconds = duration.total_seconds()
    except (TypeError, ValueError, AttributeError, OverflowError):
        raise ConfigurationError(
            f"A time for {name} is given as 'DD:HH:MM:SS', a datetime.timedelta or a dictionary such as"
            f" {{'minutes': 30}}, not {value!r}."
        ) from None
    if seconds < 0:
        raise ConfigurationError(f"{name} is a time that has to pass, so it must not be negative, but is {value!r}.")
    return seconds


def _parse_duration(text: str) -> timedelta:
    match = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", text.strip())
    if match is None:
        raise ValueError(text)
    days, hours, minutes, seconds = map(int, match.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


def gradient_clipping(value: Any, algorithm: Any) -> tuple[float | None, GradClipAlgorithmType | None]:
    """Check the arguments of gradient clipping.

    Args:
        value: The threshold, from 0; None: no clipping.
        algorithm: "norm" or "value"; None: the default.

    Returns:
        The threshold and the algorithm, which is equal to its lower-case name.

    Raises:
        ConfigurationError: If one of them is something else.
    """
    # `not value >= 0` refuses NaN as well.
    if value is not None and (not is_number(value) or not value >= 0):
        error = ConfigurationError if is_number(value) else ConfigurationTypeError
        raise error(f"gradient_clip_val must be a number from 0, or None for no clipping, not {value!r}.")
    if algorithm is None:
        return value, None
    # A GradClipAlgorithmType is a string, but `str` returns another one of it.
    name = algorithm.lower() if isinstance(algorithm, str) else str(algorithm)
    return value, GradClipAlgorithmType(check_choice("gradient_clip_algorithm", name, ["norm", "value"]))


def make_profiler(profiler: Profiler | str | None) -> Profiler:
    """Return the profiler: a name, one of Lightning's, or None for one that measures nothing."""
    if profiler is None:
        return PassThroughProfiler()
    if isinstance(profiler, str):
        name = check_choice("profiler", profiler.lower(), list(_PROFILERS))
        return _PROFILERS[name]()
    if not is_a(profiler, Profiler):
        raise ConfigurationError(f"profiler must be a name, one of Lightning's profilers, or None, not {profiler!r}.")
    lightning_profiler: Profiler = profiler
    return lightning_profiler


# Arguments whose default depends on `barebones`: the default without, and with it.
_DEFAULTS: dict[str, tuple[Any, Any]] = {
    "enable_checkpointing": (True, False),
    "logger": (True, False),
    "enable_progress_bar": (True, False),
    "log_every_n_steps": (50, 0),
    "enable_model_summary": (True, False),
    "num_sanity_val_steps": (2, 0),
    "fast_dev_run": (False, False),
    "detect_anomaly": (False, False),
    "detect_nonfinite": (None, None),
    "profiler": (None, None),
}
_SWITCHES = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "detect_anomaly")


def check_barebones(barebones: bool, arguments: dict[str, Any]) -> dict[str, Any]:
    """Fill in the arguments whose default depends on `barebones`.

    Args:
        barebones: Whether everything that costs time is off.
        arguments: The user's values; None stands for the default.

    Returns:
        The arguments with their defaults.

    Raises:
        ConfigurationError: If `barebones` contradicts another argument.
    """
    check_flags(barebones=barebones, **{name: arguments[name] for name in _SWITCHES})
    values = {}
    for name, value in arguments.items():
        default, barebones_default = _DEFAULTS[name]
        if barebones:
            if value:
                raise ConfigurationError(
                    f"barebones=True turns off everything that costs time, which contradicts {name}={value!r}. Leave"
                    " one of them out."
                )
            values[name] = barebones_default
        elif value is None:
            values[name] = default
        else:
            values[name] = value
    return values


def check_order(least: int | None, most: int | None, counted: str) -> None:
    """Check that a minimum does not exceed its maximum.

    Args:
        least: The minimum; None: none.
        most: The maximum; None or -1: none.
        counted: The end of both arguments' names, such as "epochs".
    """
    if least is None or most is None:
        return
    # A negative maximum means no limit.
    if 0 <= most < least:
        raise ConfigurationError(
            f"min_{counted}={least} exceeds max_{counted}={most}. Lower the one or raise the other."
        )


def check_patterns(name: str, value: Any) -> list[str | type[nn.Module]]:
    """Return a list of names, patterns and classes of submodules; None stands for an empty list."""
    if value is None:
        return []
    # A text would be a list of letters.
    if isinstance(value, str):
        raise ConfigurationError(f"{name} takes a list of names, such as [{value!r}], not {value!r}.")
    if not isinstance(value, list | tuple) or not all(map(_names_modules, value)):
        raise ConfigurationError(f"{name} must be a list of names, patterns or classes of submodules, not {value!r}.")
    return list(value)


def check_auto_flag(name: str, value: Any) -> Literal["auto"] | bool:
    """Return "auto", True or False: a switch that may be left to the trainer."""
    if isinstance(value, bool):
        return value
    if value == "auto":
        return "auto"
    raise ConfigurationError(f'{name} must be "auto", True or False, not {value!r}.')


# What `torch.compile` takes under the same names.
_COMPILE_OPTIONS: dict[str, tuple[tuple[type, ...], str]] = {
    "backend": ((str,), "the name of a backend"),
    "dynamic": ((bool, type(None)), "True, False or None"),
    "options": ((Mapping,), "a dictionary"),
}


def check_compile_options(value: Any) -> dict[str, Any] | None:
    """Return the options of `compile`; None if it is a switch."""
    if not isinstance(value, Mapping):
        return None
    for name, option in value.items():
        if name not in _COMPILE_OPTIONS:
            raise ConfigurationError(f"compile has no option {name!r}. Its options are {', '.join(_COMPILE_OPTIONS)}.")
        types, words = _COMPILE_OPTIONS[name]
        if not isinstance(option, types):
            raise ConfigurationError(f"compile: {name} must be {words}, not {option!r}.")
    return dict(value)


def _names_modules(item: Any) -> bool:
    if isinstance(item, type):
        return issubclass(item, nn.Module)
    return isinstance(item, str) and bool(item)


def root_directory(path: Any) -> str:
    """Return the default folder of files: the path, or the working folder for None."""
    if path is None:
        return os.getcwd()
    if not isinstance(path, str | os.PathLike):
        raise ConfigurationError(f"default_root_dir must be a path, not {path!r}.")
    place = to_path(path)
    if not isinstance(place, Path):
        # An unknown file system, or one whose package is not installed, is an error.
        _ = place.filesystem
    return os.fspath(path)
