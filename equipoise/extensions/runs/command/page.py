"""The page of `equipoise runs`: the table beside the curves of all runs over each other, and what was run."""

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from urllib.parse import quote

from equipoise.extensions.common.page.markup import Markup, cut, hint, join, section, table, tag
from equipoise.extensions.common.page.page import html_page, page_header, recommendation_section
from equipoise.extensions.report.page.sections import MOST_CHARTS
from equipoise.extensions.runs.columns import best_run, main_metrics
from equipoise.extensions.runs.command.curves import curves_section
from equipoise.extensions.runs.command.parallel import parallel_section
from equipoise.extensions.runs.command.runs_table import key_to_lines, name_in_parts, runs_table
from equipoise.extensions.runs.command.shown_runs import ShownRun, shown_runs, sweep_folder, time_in_words
from equipoise.extensions.runs.configuration import differences_between, differing_keys
from equipoise.extensions.runs.run import Run, Unreadable
from equipoise.formats import format_number

__all__ = ["report_link", "runs_page"]

# What a page shows at most, so that it stays below 2 MB.
_MOST_RUNS = 200
_MOST_METRICS = 6
# Axes of parallel coordinates: keys, and metrics.
_MOST_AXES = 6
_MOST_RESULTS = 2
_MOST_LINES = 800
_MOST_UNREADABLE = 50
_MOST_SAME = 3


def runs_page(
    runs: Sequence[Run], unreadable: Sequence[Unreadable], folder: Path, *, time: str = "", script: str = ""
) -> str:
    """Return the HTML of the page.

    Args:
        runs: The runs in their order, of which the first 200 are shown.
        unreadable: Files that could not be read.
        folder: The folder in which the page will lie, for links to reports.
        time: A sentence on its time. Default: the present time.
        script: JavaScript that runs after that of the page, and may ask the page's server. Default: none.
    """
    sweep = sweep_folder(runs)
    title = f"{len(runs):,} runs"
    outcome = ""
    if len(runs) == 1:
        title = cut(runs[0].name)
        outcome = runs[0].state
    elif sweep is not None:
        title = f"Sweep {time_in_words(sweep) or sweep.name}"
        for metric in main_metrics(runs)[:1]:
            title += f": {len(runs):,} jobs by {metric}"
    return html_page(
        title,
        page_header("Runs side by side", title, time, outcome),
        _sections(runs, sweep, unreadable, folder),
        style=_file("runs.css"),
        script=_file("runs.js") + script,
        asks_server=bool(script),
    )


def report_link(run: Run, folder: Path) -> str | None:
    """Return the link to the report of a run from a page in a folder, quoted; None without a report."""
    if run.report is None:
        return None
    try:
        path = Path(os.path.relpath(run.report, folder))
    except ValueError:
        # Another drive of Windows.
        return None
    # A colon is quoted, so no name begins another scheme.
    return quote(path.as_posix().encode(errors="surrogateescape"))


def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _sections(
    runs: Sequence[Run], sweep: PurePath | None, unreadable: Sequence[Unreadable], folder: Path
) -> Iterator[Markup | None]:
    if runs:
        yield from _sections_of_runs(runs, sweep, folder)
    else:
        yield section("Runs", hint("There are none. ", tag("code", "equipoise fit"), " begins one."))
    if unreadable:
        rows = [(cut(failure.path), cut(failure.reason)) for failure in unreadable[:_MOST_UNREADABLE]]
        yield section("Not read", table(("File", "Reason"), rows), note=f"{len(unreadable)}")


def _sections_of_runs(runs: Sequence[Run], sweep: PurePath | None, folder: Path) -> Iterator[Markup | None]:
    # 1. The best job of a sweep.
    metrics = main_metrics(runs)[:_MOST_METRICS]
    best = None
    if sweep is not None and metrics:
        best = best_run(runs, metrics[0])
    shown = shown_runs(runs, best)[:_MOST_RUNS]
    if best is not None:
        yield _best_section(best, runs, metrics[0])

    # 2. The table beside the curves. Many runs have fewer figures, so that the page stays small.
    note = ""
    if len(runs) > len(shown):
        note = f"the first {len(shown)} of {len(runs):,}"
    links = [report_link(row.run, folder) for row in shown]
    # A single value of each run, such as that of a test, stands in the table alone.
    curved = [name for name in main_metrics(runs) if any(len(run.curves.get(name, ())) > 1 for run in runs)]
    curved = curved or metrics
    drawn = curved[: max(1, min(MOST_CHARTS, _MOST_LINES // len(shown)))]
    of_all = ""
    if len(curved) > len(drawn):
        of_all = f"{len(drawn)} of {len(curved)} metrics"
    yield tag(
        "div",
        section("Runs", *runs_table(shown, links, metrics, is_sweep=sweep is not None), note=note),
        tag("div", curves_section("Curves by step", shown, drawn, "step", of_all)),
        tag("div", curves_section("Curves by time", shown, drawn, "seconds", of_all)),
        class_="workspace",
    )

    # 3. What differs, and the results.
    yield parallel_section(shown, differing_keys(runs)[:_MOST_AXES], drawn[:_MOST_RESULTS])

    # 4. What was run.
    yield _origins_section(shown)


# The best job of a sweep.


def _best_section(best: Run, runs: Sequence[Run], metric: str) -> Markup:
    """Name the best job of a sweep, and the overrides with which another run has its configuration."""
    value = best.metrics[metric]
    direction = "greatest"
    if value.mode == "min":
        direction = "least"
    overrides = [override for override in best.overrides if any(override not in run.overrides for run in runs)]
    if not best.overrides:
        keys = [key for key in differing_keys(runs) if key in best.configuration]
        overrides = [f"{key}={best.configuration[key]}" for key in keys]
    words = f"Job {PurePath(best.name).name} has the {direction} {metric}, {format_number(value.best)}"
    same = [run for run in runs if run is not best and metric in run.metrics and run.metrics[metric].best == value.best]
    if same:
        words += f", like {', '.join(f'job {PurePath(run.name).name}' for run in same[:_MOST_SAME])}"
    if len(same) > _MOST_SAME:
        words += f" and {len(same) - _MOST_SAME} more"
    return recommendation_section(f"{words}.", [*map(shlex.quote, overrides)], title="Best job")


# What was run.


def _origins_section(shown: Sequence[ShownRun]) -> Markup:
    """Return the table of the first difference to the first run, commits, versions and commands.

    A single run has a table of its facts.
    """
    if len(shown) == 1:
        facts = []
        for fact, value in shown[0].run.origin.items():
            if value:
                facts.append((fact.capitalize(), cut(value)))
        return section("What was run", table(("Fact", "Value"), facts))
    # 1. Facts in which runs differ are columns, all others are a sentence.
    columns = []
    common = []
    for fact in dict.fromkeys(fact for row in shown for fact in row.run.origin):
        texts = {row.run.origin.get(fact) for row in shown}
        if len(texts) > 1:
            columns.append(fact)
        elif any(texts):
            common.append(f"{fact}: {cut(texts.pop())}")
    note = None
    if common:
        note = hint(f"The same in all runs: {'; '.join(common)}.")

    # 2. The rows.
    heads = ["Run", "Folder", "First difference to the first run"]
    heads += [fact.capitalize() for fact in columns]
    first = min(shown, key=lambda row: row.run.began or 0.0).run
    rows: list[list[object]] = []
    for row in shown:
        cells: list[object] = [
            join(key_to_lines(row), name_in_parts(row)),
            cut(row.run.name),
            _first_difference(row.run, first),
        ]
        cells += [cut(row.run.origin.get(fact, "")) for fact in columns]
        rows.append(cells)
    return section("What was run", tag("div", table(heads, rows), class_="origins"), note)


def _first_difference(run: Run, first: Run) -> str:
    if run is first:
        return "the first run"
    lines = differences_between(run, first)
    if not lines:
        return "none"
    text = cut(lines[0])
    if len(lines) > 1:
        text += f", and {len(lines) - 1} more"
    return text
