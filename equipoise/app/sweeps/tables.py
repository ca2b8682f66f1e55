"""Tables of a sweep: one that is redrawn while jobs run, and one at the end."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rich
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from equipoise.app.sweeps.results import JobResult, JobState, SweepResults
from equipoise.formats import format_duration, format_number, format_path
from equipoise.names.extensions import load_extension, names_of_extensions
from equipoise.notices import rank_zero_warn
from equipoise.tables.live_table import LiveTable
from equipoise.tables.whole_table import print_table, print_text

__all__ = ["SweepDisplay", "closing_table", "live_table", "print_closing_table"]

# Functions that receive the folder of a sweep and return the page that they have written, or None.
_PAGES = "sweep_pages"
# Most metrics in a table; results.csv has all of them.
_MOST_METRICS = 4
# Rows of the live table, in which jobs that wait are left out first.
_MOST_ROWS = 24
# Stands for a value that a job does not have.
_UNKNOWN = "-"
_STYLES = {
    JobState.WAITING: "dim",
    JobState.RUNNING: "cyan",
    JobState.DONE: "green",
    JobState.FAILED: "red",
    JobState.INTERRUPTED: "yellow",
}


class SweepDisplay:
    """Shows the jobs of a sweep: a table on a terminal, else a line for each job that ends.

    Args:
        results: The results of the sweep.
        console: The console to print to. Default: None, rich's.
    """

    def __init__(self, results: SweepResults, console: Console | None = None) -> None:
        self._results = results
        self._console = console or rich.get_console()
        self._live = LiveTable(self._table, self._console, is_shown=sys.stdout.isatty())

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the jobs during a block. The live table disappears at the end, as the closing one follows."""
        with self._live.shown():
            yield

    def _table(self) -> Table:
        return live_table(self._results)

    def end(self, job: JobResult) -> None:
        """Show the end of a job, and keep its result."""
        self._results.write()
        if self._live.is_shown:
            return
        duration = format_duration(job.seconds or 0.0)
        values = job.values
        settings = " ".join(f"{key}={values[key]}" for key in self._results.keys if key in values)
        line = f"Job {job.number} {job.state.value} after {duration}: {settings}"
        if job.error is not None:
            line += f"; {job.summary_of_error}"
        for name in _shown_metrics(self._results):
            if name in job.metrics:
                line += f"; {name} {format_number(job.metrics[name])}"
        print_text(line, self._console)


def _shown_metrics(results: SweepResults) -> list[str]:
    """Return the names of the values in a table: those that the sweep optimises, else the first logged ones."""
    objectives: list[str] = []
    # Jobs may have different objectives: each has its own configuration.
    for job in results.jobs:
        objectives += [name for name in job.objectives if name not in objectives]
    if objectives:
        return objectives
    return results.metric_names[:_MOST_METRICS]


def _has_devices(results: SweepResults) -> bool:
    """Return whether the launcher gives each job a device. Hydra's own launchers do not."""
    return any(job.device for job in results.jobs)


def live_table(results: SweepResults) -> Table:
    """Return the table of jobs as they are now."""
    ended = sum(job.has_ended for job in results.jobs)
    title = f"{ended} of {len(results.jobs)} jobs have ended"
    # A screen shows no more than its height.
    rows = _rows_to_show(results.jobs)
    hidden = len(results.jobs) - len(rows)
    if hidden:
        title += f", {hidden} are not shown"
    table = _empty_table(title, results, ["epoch"])
    for job in rows:
        epoch = _UNKNOWN
        if job.epoch is not None:
            epoch = str(job.epoch)
        _add_row(table, job, results, [epoch])
    return table


def _rows_to_show(jobs: Sequence[JobResult]) -> list[JobResult]:
    """Return the jobs that fit on a screen: those that run first, then the latest that ended, then the next ones."""
    if len(jobs) <= _MOST_ROWS:
        return list(jobs)
    running = [job for job in jobs if job.state is JobState.RUNNING]
    ended = [job for job in jobs if job.has_ended]
    waiting = [job for job in jobs if job.state is JobState.WAITING]
    chosen = [*running, *reversed(ended), *waiting][:_MOST_ROWS]
    return sorted(chosen, key=lambda job: job.number)


def closing_table(results: SweepResults) -> Table:
    """Return the table of all results."""
    counts = []
    for state in JobState:
        count = sum(job.state is state for job in results.jobs)
        if count:
            counts.append(f"{count} {state.value}")
    table = _empty_table(f"Sweep: {', '.join(counts)}", results, [])
    for job in results.jobs:
        _add_row(table, job, results, [])
    return table


def print_closing_table(results: SweepResults, console: Console | None = None) -> None:
    """Print the table of all results, the errors of jobs, and where the results are written.

    Args:
        results: The results of the sweep.
        console: The console to print to. Default: None, rich's.
    """
    results.write()
    console = console or rich.get_console()
    print_table(closing_table(results), console)
    # Errors and paths stand outside of the table, so that it does not break them.
    for job in results.jobs:
        if job.error is not None:
            line = Text.assemble((f"Job {job.number}: ", "dim"), job.summary_of_error)
            print_text(line, console)
    line = Text.assemble(("Results: ", "dim"), format_path(str(results.path)))
    print_text(line, console)
    for path in _added_pages(results):
        line = Text.assemble(("Page: ", "dim"), format_path(str(path)))
        print_text(line, console)


def _added_pages(results: SweepResults) -> Iterator[Path]:
    """Yield the pages that extensions write about the folder of a sweep. One that fails is left out with a warning."""
    if results.path is None:
        return
    for name in names_of_extensions(_PAGES):
        try:
            path = load_extension(_PAGES, name)(results.path.parent)
        except Exception as error:
            rank_zero_warn(f"The page {name!r} of the sweep is missing: {type(error).__name__}: {error}")
        else:
            if path is not None:
                yield path


def _empty_table(title: str, results: SweepResults, further: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, title=title, title_justify="left")
    table.add_column("job", justify="right")
    for key in results.keys:
        table.add_column(key, overflow="fold")
    table.add_column("state", no_wrap=True)
    if _has_devices(results):
        table.add_column("device", no_wrap=True)
    for name in ("time", *further, *_shown_metrics(results)):
        table.add_column(name, justify="right")
    return table


def _add_row(table: Table, job: JobResult, results: SweepResults, further: Sequence[str]) -> None:
    values = job.values
    cells: list[Any] = [str(job.number)]
    # As texts, since rich would read brackets as markup.
    cells += [Text(values.get(key, "")) for key in results.keys]
    cells.append(Text(job.state.value, _STYLES[job.state]))
    if _has_devices(results):
        cells.append(job.device or _UNKNOWN)
    time = _UNKNOWN
    elapsed = job.elapsed
    if elapsed is not None:
        time = format_duration(elapsed)
    cells += [time, *further]
    for name in _shown_metrics(results):
        value = _UNKNOWN
        if name in job.metrics:
            value = format_number(job.metrics[name])
        cells.append(value)
    table.add_row(*cells)
