"""The errors that Equipoise raises; each is also a standard exception, so generic handlers catch it.

Programs written for Lightning catch its `MisconfigurationException`. `import equipoise` must not import Lightning, so
the class cannot be a base here. Instead, an error that is raised while Lightning is loaded gets a class derived from
both. Where Lightning is not loaded, no program can name its class.
"""

import sys
from functools import cache
from typing import Any, Self

__all__ = [
    "CheckpointError",
    "CheckpointNotFoundError",
    "ConfigurationError",
    "ConfigurationRuntimeError",
    "ConfigurationTypeError",
    "StepError",
    "SweepError",
    "WorkerError",
    "in_one_line",
]

# Modules that define `MisconfigurationException`.
_LIGHTNINGS_MODULES = ("lightning.fabric.utilities.exceptions", "lightning_fabric.utilities.exceptions")


class _AlsoLightnings(Exception):
    """An error that `except MisconfigurationException` catches, too, once Lightning is loaded."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        kind: Any = cls
        joined_class = _joined(kind, _loaded_classes())
        error: Self = super().__new__(joined_class, *args)
        return error

    def __reduce__(self) -> Any:
        """Pickle by the class that can be imported; the other process joins it with the classes loaded there."""
        importable = next(kind for kind in type(self).__mro__ if "_is_joined" not in vars(kind))
        return importable, self.args, vars(self) or None


def _loaded_classes() -> tuple[type[Exception], ...]:
    """Return Lightning's class for wrong input, in each of its packages that is loaded."""
    classes: list[type[Exception]] = []
    for name in _LIGHTNINGS_MODULES:
        kind = getattr(sys.modules.get(name), "MisconfigurationException", None)
        # One package may import the class of the other.
        if kind is not None and kind not in classes:
            classes.append(kind)
    return tuple(classes)


@cache
def _joined(kind: type[Any], lightning_classes: tuple[type[Exception], ...]) -> type[Any]:
    """Return a class derived from `kind` and Lightning's classes, under the name of `kind`."""
    # The bases that `kind` does not have yet.
    missing = tuple(base for base in lightning_classes if not issubclass(kind, base))
    if not missing:
        return kind
    attributes = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "_is_joined": True,
    }
    return type(kind.__name__, (kind, *missing), attributes)


class ConfigurationError(_AlsoLightnings, ValueError):
    """An argument, or a combination of arguments, that cannot work; raised before any training.

    Where Lightning is loaded, `except MisconfigurationException` catches it, too.
    """


class ConfigurationTypeError(ConfigurationError, TypeError):
    """An argument of a type that cannot work, where Lightning raises a TypeError."""


class ConfigurationRuntimeError(ConfigurationError, RuntimeError):
    """A wrong argument that shows in the course of a run, where Lightning raises a RuntimeError."""


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, damaged, of another model, or not safe to read."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A path at which there is no checkpoint, where Lightning raises a FileNotFoundError."""


class StepError(_AlsoLightnings, RuntimeError):
    """A step of the user's module returned or used something that cannot be trained.

    Where Lightning is loaded, `except MisconfigurationException` catches it, too.
    """


class SweepError(RuntimeError):
    """Jobs of a sweep failed, while the others ran to their ends."""


class WorkerError(RuntimeError):
    """A process of the run was killed, has ended early, or hangs; an error that it raises keeps its own class."""


def in_one_line(error: BaseException) -> str:
    r"""Return the type of an error and the first line of its message; of a `ConfigurationError` the latter alone.

    Example:
        >>> in_one_line(ValueError("no [steps] today\nbut tomorrow"))
        'ValueError: no [steps] today'
    """
    first_line, _, _ = str(error).strip().partition("\n")
    if isinstance(error, ConfigurationError):
        return first_line
    return f"{type(error).__name__}: {first_line}"
