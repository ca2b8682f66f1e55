"""Calls of Hydra: its import, which a command puts off until it needs it, and overrides in its grammar."""

from types import ModuleType

from equipoise.errors import ConfigurationError
from equipoise.names.imports import collector_paused

__all__ = ["import_compose", "is_override", "quoted"]


def import_compose() -> ModuleType:
    """Return `equipoise.app.compose`, which imports Hydra.

    Raises:
        ConfigurationError: If Hydra is not installed.
    """
    try:
        with collector_paused():
            from equipoise.app import compose
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("hydra", "omegaconf"):
            raise
        raise ConfigurationError(
            f"This command needs Hydra, but {error.name} is not installed: pip install hydra-core."
            " `from equipoise import Trainer` works without it."
        ) from None
    return compose


def is_override(argument: str) -> bool:
    """Tell an override from a flag, the value of one, and a key to explain."""
    if argument.startswith("-"):
        return False
    return argument == "" or "=" in argument or argument.startswith(("~", "+"))


def quoted(argument: str) -> str:
    """Quote a path with an equals sign; names of checkpoints have one, but Hydra's grammar does not allow it."""
    key, _, value = argument.partition("=")
    if key != "ckpt_path" or "=" not in value:
        return argument
    if value.startswith(("'", '"')):
        return argument
    return f"{key}='{value}'"
