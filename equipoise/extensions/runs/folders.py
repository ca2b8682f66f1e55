"""Folders that commands about runs look into."""

from collections.abc import Sequence
from pathlib import Path

from equipoise.errors import ConfigurationError

__all__ = ["DEFAULT_FOLDERS", "folders_of"]

DEFAULT_FOLDERS = ("outputs", "multirun")


def folders_of(names: Sequence[str], takes: str) -> list[Path]:
    """Return folders by their names; those in which the command leaves runs, as far as they exist, without names.

    Args:
        names: Names of folders.
        takes: What the command takes, for the message.

    Raises:
        ConfigurationError: If a folder does not exist.
    """
    for name in names:
        if not Path(name).is_dir():
            raise ConfigurationError(f"There is no folder {name!r} on this machine: {takes}.")
    if names:
        return [Path(name) for name in names]
    return [Path(name) for name in DEFAULT_FOLDERS if Path(name).is_dir()]
