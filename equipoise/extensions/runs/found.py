"""Find the folders of runs, and the files in them that this extension reads."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from equipoise.errors import ConfigurationError
from equipoise.extensions.report.run_file.live_values import LIVE_FILE
from equipoise.extensions.runs.run import Unreadable

__all__ = ["FoundRun", "find_runs", "folders_of", "natural"]

# Where the command leaves runs.
_DEFAULT_FOLDERS = ("outputs", "multirun")

_CONFIGURATION = "config.yaml"
_FILES = (_CONFIGURATION, "run.json", LIVE_FILE, "metrics.csv", "hparams.yaml", "report.html")
# Files of which one is enough to be a run.
_SIGNS = {_CONFIGURATION, "run.json", "metrics.csv"}
# Digits that count in a number within a name.
_DIGITS = 18
_NEVER = {"checkpoints", "__pycache__"}


@dataclass
class FoundRun:
    """Folder of a run.

    Attributes:
        folder: The folder.
        files: Its files by their names. Loggers have some of them in folders of their own.
    """

    folder: Path
    files: dict[str, Path]


def natural(text: str) -> list[tuple[int, str]]:
    """Return a key by which "job 9" stands before "job 10".

    Example:
        >>> sorted(["10", "9", "a"], key=natural)
        ['9', '10', 'a']
    """
    key = []
    for part in re.findall(r"[0-9]+|[^0-9]+", text):
        number = 10**_DIGITS
        if part[0].isdigit():
            number = int(part[:_DIGITS])
        key.append((number, part))
    return key


def folders_of(names: Sequence[str], takes: str) -> list[Path]:
    """Return folders by their names; those in which the command leaves runs, as far as they exist, without names.

    Args:
        names: Names of folders.
        takes: A phrase that says what the command takes, for the message.

    Raises:
        ConfigurationError: If a folder does not exist.
    """
    for name in names:
        if not Path(name).is_dir():
            raise ConfigurationError(f"There is no folder {name!r} on this machine: {takes}.")
    if names:
        return [Path(name) for name in names]
    return [Path(name) for name in _DEFAULT_FOLDERS if Path(name).is_dir()]


def find_runs(folders: Sequence[Path]) -> Iterator[FoundRun | Unreadable]:
    """Yield the runs below folders, each once, and folders that cannot be listed. Links are not followed."""
    # One folder may lie in another.
    paths: set[Path] = set()
    for folder in folders:
        for result in _runs_below(folder):
            if isinstance(result, FoundRun):
                path = result.folder.resolve()
            else:
                path = result.path
            if path not in paths:
                paths.add(path)
                yield result


def _runs_below(folder: Path) -> list[FoundRun | Unreadable]:
    results: list[FoundRun | Unreadable] = []
    # Folders to look into, each with the run above it that has a configuration.
    waiting: list[tuple[Path, FoundRun | None]] = [(folder, None)]
    while waiting:
        here, above = waiting.pop()
        try:
            files, subfolders = _entries(here)
        except OSError as error:
            results.append(Unreadable(here, error.strerror or str(error)))
            continue
        if above is not None and _CONFIGURATION not in files:
            # The newest version of a logger's folder comes first.
            above.files = files | above.files
        elif not _SIGNS.isdisjoint(files):
            run = FoundRun(here, files)
            results.append(run)
            above = None
            if _CONFIGURATION in files:
                above = run
        else:
            above = None
        waiting += [(subfolder, above) for subfolder in subfolders]
    return results


def _entries(folder: Path) -> tuple[dict[str, Path], list[Path]]:
    """Return the files of a run in a folder, and its subfolders in natural order."""
    files = {}
    subfolders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name in _FILES and entry.is_file(follow_symlinks=False):
                files[entry.name] = Path(entry.path)
                continue
            is_hidden = entry.name.startswith(".")
            if entry.is_dir(follow_symlinks=False) and entry.name not in _NEVER and not is_hidden:
                subfolders.append(Path(entry.path))
    subfolders.sort(key=lambda path: natural(path.name))
    return files, subfolders
