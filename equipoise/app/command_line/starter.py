"""`equipoise init`: write the starter project, which is the digits example."""

import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path

from equipoise.app.command_line.folders import starter_folder
from equipoise.errors import ConfigurationError

__all__ = ["write_project"]


def write_project(arguments: Sequence[str], folders: Sequence[Path]) -> None:
    """Write the starter project into a new or empty folder.

    Args:
        arguments: The folder.
        folders: None.

    Raises:
        ConfigurationError: If there is another number of arguments, or the folder cannot be written.
    """
    if len(arguments) != 1 or arguments[0].startswith("-"):
        text = " ".join(arguments) or "nothing"
        raise ConfigurationError(f"equipoise init takes one folder; it was given {text}.")
    name = arguments[0]
    folder = Path(name)
    if folder.exists() and not _is_empty_folder(folder):
        raise ConfigurationError(
            f"equipoise init writes into a new or empty folder, but {name!r} exists and is not empty. Name another."
        )
    # A checkout may hold the files of earlier runs and tests.
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", "outputs", "multirun", ".*_cache", ".hypothesis")
    try:
        shutil.copytree(starter_folder(), folder, ignore=ignore, dirs_exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"equipoise init cannot write into {name!r}: {error}. Name another.") from error
    change = "" if folder.resolve() == Path.cwd() else f"cd {folder} && "
    print(f"A project is in {folder.resolve().name}. Train it:\n\n  {change}equipoise fit")
    if importlib.util.find_spec("sklearn") is None:
        print("\nIts data come from scikit-learn, which is not installed: pip install scikit-learn")


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
