"""WatchedRuns: the page of runs at the present moment, made again only if files have changed."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from time import monotonic

from equipoise.extensions.runs.columns import newest_first
from equipoise.extensions.runs.command.page import report_link, runs_page
from equipoise.extensions.runs.found import FoundRun, find_runs, folders_of
from equipoise.extensions.runs.reading import Reading, read_run, read_runs
from equipoise.extensions.runs.run import Run, Unreadable

__all__ = ["Page", "WatchedRuns"]

# Seconds after which the page is made again in any case: the process of a run may have ended without a word.
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


class WatchedRuns:
    """The page of the runs below folders.

    Args:
        folders: The folders. Without any those in which the command leaves runs, which need not exist yet.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        # Links among them are those of the user, and are followed once.
        self._folders = _places_of(folders)
        self._page: Page | None = None
        # Of the files of which the page was made, and when.
        self._stamps: Sequence[object] = ()
        self._made = 0.0
        # By the folders of runs: the stamps of files, and what was read in them.
        self._readings: dict[Path, tuple[Sequence[object], Reading]] = {}
        # Requests come in threads.
        self._lock = Lock()

    def page(self) -> Page:
        """Return the page of the present moment."""
        with self._lock:
            folders = self._folders
            if not folders:
                folders = _places_of(folders_of((), ""))
            results = list(find_runs([*folders]))
            stamps = [_stamps_of(result) for result in results]
            is_old = monotonic() - self._made >= _SILENCE
            if self._page is None or is_old or stamps != self._stamps:
                runs, unreadable = read_runs(results, self._read)
                self._page = _make_page(runs, unreadable, folders)
                self._stamps = stamps
                self._made = monotonic()
            return self._page

    def _read(self, run_files: FoundRun) -> Reading:
        """Read a run, unless it had ended before, all of it could be read, and none of its files has changed."""
        stamps = _stamps_of(run_files)
        earlier, reading = self._readings.get(run_files.folder, ((), (None, [])))
        run, unreadable = reading
        is_under_way = run is not None and run.state == "running"
        # An error may pass without a change of the file, such as one of a network.
        if is_under_way or unreadable or stamps != earlier:
            reading = read_run(run_files)
            self._readings[run_files.folder] = stamps, reading
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
        newest_first(runs),
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
    return Page(f'"{hashlib.sha256(html).hexdigest()}"', html, reports)


def _common_root(folders: Sequence[Path]) -> Path:
    if not folders:
        return Path.cwd()
    try:
        return Path(os.path.commonpath(folders))
    except ValueError:
        # Several drives of Windows; those of the others have no links.
        return folders[0]


def _stamps_of(result: FoundRun | Unreadable) -> Sequence[object]:
    """Return what changes when a run writes."""
    if isinstance(result, Unreadable):
        return [result]
    stamps: list[object] = [result.folder]
    # The results of a sweep say how a job ended.
    results = result.folder.parent / "results.csv"
    for name, path in {**result.files, "results.csv": results}.items():
        # It may be removed in this moment.
        with suppress(OSError):
            status = path.stat()
            stamps += [name, status.st_mtime_ns, status.st_size]
    return stamps
