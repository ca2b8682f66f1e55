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
    "ConfigurationError",
    "ConfigurationRuntimeError",
    "ConfigurationTypeError",
    "StepError",
    "WorkerError",
]

_LIGHTNINGS_MODULES = ("lightning.fabric.utilities.exceptions", "lightning_fabric.utilities.exceptions")


class _AlsoLightnings(Exception):
    """An error that `except MisconfigurationException` catches, too, once Lightning is loaded."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        kind: Any = cls
        error: Self = super().__new__(_joined(kind, _loaded_classes()), *args)
        return error

    def __reduce__(self) -> Any:
        """Pickle by the class that has a name; the other process joins it with the classes that are loaded there."""
        named = next(kind for kind in type(self).__mro__ if "_is_joined" not in vars(kind))
        return named, self.args, vars(self) or None


def _loaded_classes() -> tuple[type[Exception], ...]:
    """Return Lightning's class for wrong input, in each of its packages that is loaded."""
    modules = [sys.modules.get(name) for name in _LIGHTNINGS_MODULES]
    found = [getattr(module, "MisconfigurationException", None) for module in modules]
    return tuple(dict.fromkeys(kind for kind in found if kind is not None))


@cache
def _joined(kind: type[Any], others: tuple[type[Exception], ...]) -> type[Any]:
    """Return a class derived from `kind` and the others, under the name of `kind`."""
    missing = tuple(other for other in others if not issubclass(kind, other))
    if not missing:
        return kind
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind, *missing), {**body, "_is_joined": True})


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


class StepError(_AlsoLightnings, RuntimeError):
    """A step of the user's module returned or asked for something that cannot be trained on.

    Where Lightning is loaded, `except MisconfigurationException` catches it, too.
    """


class WorkerError(RuntimeError):
    """A process of the run was killed, left, or hung; an error that it raised is raised as what it is."""
