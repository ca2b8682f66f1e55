"""WatchedRuns: the page of runs at the present moment, read again only where files have changed."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from time import monotonic

from equipoise.extensions.runs.columns import sorted_runs
from equipoise.extensions.runs.found import FoundRun, find_runs, folders_of
from equipoise.extensions.runs.page import report_link, runs_page
from equipoise.extensions.runs.reading import read_run
from equipoise.extensions.runs.run import Run, Unreadable

__all__ = ["Page", "WatchedRuns"]

# Seconds after which a run that writes nothing is read again: its process may have ended without a word.
_SILENCE = 10.0


@dataclass(frozen=True)
class Page:
    """The page of one moment.

    Attributes:
        version: Changes when the content does.
        html: The page.
        reports: By the paths of links, a watched folder and the report below it.
    """

    version: str
    html: bytes
    reports: dict[str, tuple[Path, Path]]


@dataclass(frozen=True, eq=False)
class _Reading:
    """Content of the files of a run.

    Attributes:
        stamps: Names, times and sizes of its files.
        run: The run; None for a folder that is no run.
        unreadable: Its files that could not be read.
        time: When it was read.
    """

    stamps: Sequence[object]
    run: Run | None
    unreadable: Sequence[Unreadable]
    time: float = field(default_factory=monotonic)


class WatchedRuns:
    """The page of the runs below folders.

    Args:
        folders: The folders. Without any those in which the command leaves runs, which need not exist yet.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        # Links among them are those of the user, and are followed once.
        self._folders = _places_of(folders)
        # By the folders of runs.
        self._readings: dict[Path, _Reading] = {}
        self._page: Page | None = None
        # The readings and failures of which the page was made.
        self._parts: tuple[object, ...] = ()
        # Requests come in threads.
        self._lock = Lock()

    def page(self) -> Page:
        """Return the page of the present moment."""
        with self._lock:
            return self._present_page()

    def _present_page(self) -> Page:
        # 1. Read what has changed.
        readings: list[_Reading] = []
        unreadable: list[Unreadable] = []
        folders = self._folders
        if not folders:
            folders = _places_of(folders_of((), ""))
        for result in find_runs([*folders]):
            if isinstance(result, Unreadable):
                unreadable.append(result)
                continue
            reading = self._read(result)
            readings.append(reading)
            unreadable += reading.unreadable
        self._readings = {folder: reading for folder, reading in self._readings.items() if reading in readings}
        parts = (*readings, *unreadable)
        if self._page is not None and parts == self._parts:
            return self._page
        # 2. Make the page.
        runs = [reading.run for reading in readings if reading.run is not None]
        self._page = _make_page(runs, unreadable, folders)
        self._parts = parts
        return self._page

    def _read(self, run_files: FoundRun) -> _Reading:
        stamps = _stamps_of(run_files)
        earlier = self._readings.get(run_files.folder)
        if earlier is not None and earlier.stamps == stamps:
            is_under_way = earlier.run is not None and earlier.run.state == "running"
            if not is_under_way or monotonic() - earlier.time < _SILENCE:
                return earlier
        reading = _Reading(stamps, *read_run(run_files))
        self._readings[run_files.folder] = reading
        return reading


def _places_of(folders: Sequence[Path]) -> dict[Path, Path]:
    """Return where folders are, by their absolute paths."""
    places = {}
    for folder in folders:
        path = os.path.abspath(folder)
        places[Path(path)] = Path(os.path.realpath(path))
    return places


def _make_page(runs: Sequence[Run], unreadable: Sequence[Unreadable], folders: Mapping[Path, Path]) -> Page:
    """Return the page of runs below folders, which are given with their places."""
    # 1. The page. Its links lead down from the folder that contains all others.
    root = _common_root([*folders])
    text = runs_page(
        sorted_runs(runs, None),
        unreadable,
        root,
        time="The values of this moment",
        script=Path(__file__).with_name("watch.js").read_text(encoding="utf-8"),
    )
    # 2. The reports.
    reports = {}
    for run in runs:
        link = report_link(run, root)
        if run.report is None or link is None:
            continue
        for folder, place in folders.items():
            if run.report.is_relative_to(folder):
                reports[f"/{link}"] = (place, place / run.report.relative_to(folder))
                break
    html = text.encode(errors="replace")
    version = hashlib.sha256(html).hexdigest()
    return Page(f'"{version}"', html, reports)


def _common_root(folders: Sequence[Path]) -> Path:
    if not folders:
        return Path.cwd()
    try:
        return Path(os.path.commonpath(folders))
    except ValueError:
        # Several drives of Windows; those of the others have no links.
        return folders[0]


def _stamps_of(run_files: FoundRun) -> Sequence[object]:
    """Return what changes when a run writes."""
    stamps: list[object] = []
    # The results of a sweep say how a job ended.
    results = run_files.folder.parent / "results.csv"
    for name, path in {**run_files.files, "results.csv": results}.items():
        try:
            status = path.stat()
        except OSError:
            # It was removed in this moment.
            continue
        stamps += [name, status.st_mtime_ns, status.st_size]
    return stamps
