"""Runs as a page shows them: with a short name, and a colour that each keeps while others begin."""

import re
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import PurePath
from typing import NamedTuple

from equipoise.extensions.common.page.markup import cut
from equipoise.extensions.runs.run import Run

__all__ = ["COLOURS", "ShownRun", "shown_runs", "sweep_folder", "time_in_words"]

# Colours in the style sheet.
COLOURS = 20
# Characters of the end of a name, such as the number of a job or of a seed.
_LONGEST_END = 12
# Folders that the command names by date and time, such as "2026-01-31/10-20-30-123456".
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)/(\d\d-\d\d-\d\d)(?:-(\d+))?$")


class ShownRun(NamedTuple):
    """A run on a page.

    Attributes:
        run: The run.
        name: A name that no other run of the page has.
        style: CSS classes of its lines and of the key to them.
    """

    run: Run
    name: str
    style: str

    @property
    def name_parts(self) -> tuple[str, str]:
        """The name in two parts, of which the second one must stay where there is no room for both."""
        start, slash, end = self.name.rpartition("/")
        if not start or len(end) > _LONGEST_END:
            return self.name, ""
        return start, slash + end

    def name_of(self, longest: int) -> str:
        """Return the name in at most this number of characters; a longer one has "…" before its end."""
        start, end = self.name_parts
        if len(self.name) > longest:
            start = cut(f"{start}{end}", longest - len(end))
        return start + end


def shown_runs(runs: Sequence[Run], best: Run | None = None) -> list[ShownRun]:
    """Return runs with their names, and with colours by the order in which they began.

    Args:
        runs: The runs.
        best: The run whose lines stand out. Default: none.
    """
    names = _short_names(runs)
    began = sorted(range(len(runs)), key=lambda number: runs[number].began or 0.0)
    styles = {}
    for place, number in enumerate(began):
        styles[number] = f"c{place % COLOURS}"
        if place // COLOURS % 2:
            # The next twenty have the same colours again.
            styles[number] += " dashed"
        if runs[number] is best:
            styles[number] += " best"
    return [ShownRun(run, names[number], styles[number]) for number, run in enumerate(runs)]


def sweep_folder(runs: Sequence[Run]) -> PurePath | None:
    """Return the folder of the sweep of which all runs are jobs; None if there is none."""
    paths = [PurePath(run.name) for run in runs]
    folders = {path.parent for path in paths}
    if len(runs) < 2 or len(folders) > 1 or not all(path.name.isdigit() for path in paths):
        return None
    return folders.pop()


def time_in_words(folder: PurePath, *, is_exact: bool = False) -> str:
    """Return date and time by which a folder is named; empty for another name.

    Args:
        folder: The folder.
        is_exact: Whether to add milliseconds, where the name has them. Default: False.

    Example:
        >>> time_in_words(PurePath("outputs/2026-01-31/10-20-30-123456"))
        '31 Jan 10:20:30'
    """
    parts = _TIME.search("/".join(folder.parts[-2:]))
    if parts is None:
        return ""
    day, second, fraction = parts.groups()
    try:
        time = datetime.strptime(f"{day} {second}", "%Y-%m-%d %H-%M-%S")
    except ValueError:
        return ""
    words = f"{time:%d %b %H:%M:%S}"
    if is_exact and fraction:
        words += f".{fraction[:3]}"
    return words


def _short_names(runs: Sequence[Run]) -> list[str]:
    """Return for each run its number in a sweep, its time, or the end of its path: what tells it from all others."""
    if sweep_folder(runs) is not None:
        return [PurePath(run.name).name for run in runs]
    candidates = [_names(PurePath(run.name)) for run in runs]
    names = [names_of_run[0] for names_of_run in candidates]
    # Names that several runs have become longer, until no two are the same.
    for length in range(1, max(map(len, candidates), default=0)):
        counts = Counter(names)
        for number, name in enumerate(names):
            if counts[name] > 1:
                names[number] = candidates[number][min(length, len(candidates[number]) - 1)]
    return names


def _names(path: PurePath) -> list[str]:
    """Return the names of a run by its path, the shortest first."""
    names = []
    for is_exact in (False, True):
        name = time_in_words(path, is_exact=is_exact) or path.name or str(path)
        time_of_sweep = time_in_words(path.parent, is_exact=is_exact)
        if time_of_sweep:
            name = f"{time_of_sweep} / {name}"
        names.append(name)
    return names + ["/".join(path.parts[-length:]) for length in range(2, len(path.parts) + 1)]
