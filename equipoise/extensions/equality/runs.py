"""Logged values and checkpoints that a run has left, found in its folder."""

import csv
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from equipoise.errors import CheckpointError, ConfigurationError
from equipoise.interop.remote.paths import AnyPath, to_path
from equipoise.parallel.shards.index import INDEX
from equipoise.parallel.shards.reading import has_shards
from equipoise.trainer.checkpointing.reading import open_any_checkpoint
from equipoise.validation import is_whole

__all__ = ["Cell", "Run", "find_run", "in_words"]

# The file of a CSV logger.
_METRICS = "metrics.csv"

Checkpoints = dict[int, dict[str, AnyPath]]
"""Checkpoints by step and name."""

# Folders that a message lists.
_MOST_FOLDERS = 5

# Steps that a message lists, beside the last.
_MOST_STEPS = 5


class Cell(NamedTuple):
    """The place of a logged value.

    Attributes:
        step: The step.
        name: The name of the value.
        number: Its number among those of this name and step, from 0.
    """

    step: int
    name: str
    number: int


@dataclass(frozen=True)
class Run:
    """Logged values and checkpoints of a run.

    Attributes:
        path: The path that the user gave.
        values: Logged values, as the texts of a table.
        checkpoints: Checkpoints by step and name.
    """

    path: str
    values: dict[Cell, str] = field(default_factory=dict)
    checkpoints: Checkpoints = field(default_factory=dict)

    def __str__(self) -> str:
        """Return what it has, for a message."""
        logged = in_words(cell.step for cell in self.values)
        return f"{self.path} has logged values of {logged}, and checkpoints of {in_words(self.checkpoints)}"


def find_run(path: str | os.PathLike[str]) -> Run:
    """Return what a run has left.

    Args:
        path: The folder of a run, a checkpoint, or a `metrics.csv`; on this machine or a URL.

    Raises:
        ConfigurationError: If there is nothing, or the values of several runs.
        CheckpointError: If a checkpoint cannot be read.
    """
    place = to_path(path)
    name = os.fspath(path)
    if has_shards(place):
        return Run(name, checkpoints=_by_step([place]))
    if place.is_dir():
        return _run_in(place, name)
    if not place.is_file():
        raise ConfigurationError(f"There is no file or folder {name!r}.")
    if place.suffix == ".csv":
        return Run(name, values=_values_in(place))
    return Run(name, checkpoints=_by_step([place]))


def _run_in(folder: AnyPath, name: str) -> Run:
    """Return what lies in a folder, and in those below it."""
    # 1. The table.
    tables: list[AnyPath] = sorted(folder.glob(f"**/{_METRICS}"), key=str)
    if len(tables) > 1:
        folders = [str(table.parent) for table in tables]
        listed = ", ".join(folders[:_MOST_FOLDERS])
        raise ConfigurationError(f"{name!r} holds several runs: name one, such as one of {listed}.")
    values = {}
    for table in tables:
        values = _values_in(table)

    # 2. The checkpoints, in files and in folders.
    checkpoints: list[AnyPath] = [file for file in folder.glob("**/*.ckpt") if file.is_file()]
    checkpoints += [index.parent for index in folder.glob(f"**/{INDEX}")]
    if not tables and not checkpoints:
        raise ConfigurationError(f"{name!r} is no folder of a run: it holds no {_METRICS} and no checkpoints.")
    return Run(name, values, _by_step(checkpoints))


def _values_in(table: AnyPath) -> dict[Cell, str]:
    """Return the cells of a table that are not empty, without those of the epoch, which depends on the step."""
    values = {}
    counts: Counter[tuple[int, str]] = Counter()
    with table.open("r", newline="", errors="replace") as file:
        rows = csv.DictReader(file)
        if "step" not in (rows.fieldnames or ()):
            raise ConfigurationError(f"{str(table)!r} is no table of a CSVLogger: it has no column 'step'.")
        for row in rows:
            step = row.pop("step")
            row.pop("epoch", None)
            # The last row of a run that was killed may be cut off.
            if not step or not step.isdecimal():
                continue
            for name, text in row.items():
                if name and text:
                    key = (int(step), name)
                    values[Cell(*key, counts[key])] = text
                    counts[key] += 1
    return values


def _by_step(checkpoints: Sequence[AnyPath]) -> Checkpoints:
    """Return checkpoints in their order."""
    by_step: Checkpoints = {}
    for path in sorted(checkpoints, key=str):
        # One that is not complete begins with a dot.
        if path.name.startswith("."):
            continue
        with open_any_checkpoint(path) as (content, _):
            step = content.get("global_step")
        if not is_whole(step):
            raise CheckpointError(f"{str(path)!r} does not say of which step it is: it has no 'global_step'.")
        by_step.setdefault(step, {})[path.name] = path
    return by_step


def in_words(steps: Iterable[int]) -> str:
    """Return steps in words, such as "steps 1, 2, 3"; many are shortened."""
    texts = [str(step) for step in sorted(set(steps))]
    if len(texts) > _MOST_STEPS + 1:
        texts = [*texts[:_MOST_STEPS], "...", texts[-1]]
    if not texts:
        return "no step"
    if len(texts) == 1:
        return f"step {texts[0]}"
    return f"steps {', '.join(texts)}"
