"""The page of `equipoise runs`: the table, the curves of all runs over each other, and what was run."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

import numpy

from equipoise.extensions.common.page.charts import Line, line_chart
from equipoise.extensions.common.page.markup import Markup, cut, hint, join, section, table, tag
from equipoise.extensions.common.page.page import html_page, page_header
from equipoise.extensions.common.page.scales import Point
from equipoise.extensions.runs.columns import Column, columns_of, main_metrics
from equipoise.extensions.runs.configuration import differences_between, differing_keys
from equipoise.extensions.runs.parallel import parallel_coordinates
from equipoise.extensions.runs.run import Curve, Run, Unreadable
from equipoise.formats import Unit

__all__ = ["report_link", "runs_page"]

# What a page shows at most, so that it stays below 2 MB.
_MOST_RUNS = 200
_MOST_KEYS = 12
_MOST_METRICS = 6
# Axes of parallel coordinates: keys, and metrics.
_MOST_AXES = 6
_MOST_RESULTS = 2
_MOST_LINES = 800
_MOST_POINTS = 30_000
# Dots of a chart, if each point of its lines has one.
_MOST_DOTS = 400
_MOST_UNREADABLE = 50
_LONGEST_CELL = 80
_COLOURS = ("val", "s0", "s1", "s2", "s3", "s4", "train", "s5")
_COLOURED = ("finished", "failed", "interrupted")
# Texts for the place of curves.
_NOTHING = {
    "step": "No run has logged a metric.",
    "seconds": "No run knows its times: RunReport() notes them.",
}


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
    shown = runs[:_MOST_RUNS]
    title = f"{len(runs):,} runs"
    outcome = ""
    if len(runs) == 1:
        title = cut(runs[0].name)
        outcome = runs[0].state
    return html_page(
        title,
        page_header("Runs side by side", title, time, outcome),
        _sections(shown, len(runs), unreadable, folder),
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
    runs: Sequence[Run], count: int, unreadable: Sequence[Unreadable], folder: Path
) -> Iterator[Markup | None]:
    if runs:
        yield from _sections_of_runs(runs, count, folder)
    else:
        yield section("Runs", hint("There are none."))
    if unreadable:
        rows = [(cut(each.path), cut(each.reason)) for each in unreadable[:_MOST_UNREADABLE]]
        yield section("Not read", table(("File", "Reason"), rows), note=f"{len(unreadable)}")


def _sections_of_runs(runs: Sequence[Run], count: int, folder: Path) -> Iterator[Markup]:
    # 1. The table.
    metrics = main_metrics(runs)[:_MOST_METRICS]
    note = ""
    if count > len(runs):
        note = f"the first {len(runs)} of {count:,}"
    yield section("Runs", *_runs_table(runs, metrics, folder), note=note)

    # 2. The curves. Many runs have fewer figures, so that the page stays small.
    drawn = metrics[: max(1, _MOST_LINES // len(runs))]
    yield _curves_section("Curves by step", runs, drawn, "step")
    yield _curves_section("Curves by time", runs, drawn, "seconds")

    # 3. What differs, and the results.
    coordinates = parallel_coordinates(
        runs,
        differing_keys(runs)[:_MOST_AXES],
        drawn[:_MOST_RESULTS],
        _colour,
    )
    if coordinates is not None:
        yield section("Parallel coordinates", coordinates, note="a line for each run, through what differs")

    # 4. What was run.
    yield _origins_section(runs)


def _key(number: int) -> Markup:
    """Return the key to the lines of a run."""
    return tag("i", class_=f"key {_colour(number)}")


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


# The table.


def _runs_table(runs: Sequence[Run], metrics: Sequence[str], folder: Path) -> Iterator[Markup]:
    """Yield the table, which the script of the page sorts by `data-value`, and a note on what it lacks."""
    # 1. The columns. One in which no run has a value tells nothing.
    keys = differing_keys(runs)
    columns = [column for column in columns_of(keys[:_MOST_KEYS], metrics) if any(column.cell(run) for run in runs)]

    # 2. The rows.
    names = ["Run", "State", *(column.head for column in columns)]
    heads = [tag("th", cut(name, _LONGEST_CELL), scope="col") for name in names]
    rows = []
    for number, run in enumerate(runs):
        cells = [*_first_cells(number, run, folder)]
        cells += [_cell(run, column, is_number=column.head not in keys) for column in columns]
        rows.append(tag("tr", *cells, data_run=number))

    # 3. The table scrolls where it is too wide.
    element = tag(
        "table",
        tag("thead", tag("tr", *heads)),
        tag("tbody", *rows),
        class_="runs",
    )
    yield tag("div", element, class_="scroll")
    if len(keys) > _MOST_KEYS:
        yield hint(f"{len(keys) - _MOST_KEYS} more keys differ.")


def _first_cells(number: int, run: Run, folder: Path) -> Iterator[Markup]:
    """Yield the name of a run with the key to its lines, and its state with its error."""
    yield tag("td", _key(number), _link(run, folder), data_value=cut(run.name))
    style = "pill"
    if run.state in _COLOURED:
        style += f" {run.state}"
    error = None
    if run.error:
        error = tag("span", cut(run.error), class_="cause")
    yield tag("td", tag("span", run.state, class_=style), error, data_value=run.state)


def _cell(run: Run, column: Column, *, is_number: bool) -> Markup:
    """Return a cell; its value for the script, where that is not its text."""
    text = cut(column.cell(run), _LONGEST_CELL)
    value = column.value(run)
    if isinstance(value, float):
        value = f"{value:.9g}"
    hidden = None
    if value is not None and str(value) != text:
        hidden = cut(value, _LONGEST_CELL)
    style = None
    if is_number:
        style = "number"
    return tag("td", text, class_=style, data_value=hidden)


def _link(run: Run, folder: Path) -> Markup:
    """Return the name of a run, as a link to its report if it has one."""
    name = cut(run.name)
    link = report_link(run, folder)
    if link is None:
        return tag("span", name)
    return tag("a", name, href=link)


# The curves.


def _curves_section(title: str, runs: Sequence[Run], metrics: Sequence[str], x: Unit) -> Markup:
    """Draw each metric of all runs over each other."""
    # 1. The lines of each figure.
    lines_by_metric: dict[str, list[Line]] = {}
    for name in metrics:
        lines = _lines(name, runs, x)
        if lines:
            lines_by_metric[name] = lines
    if not lines_by_metric:
        return section(title, hint(_NOTHING[x]))

    # 2. The figures. There are as many lines by step as by time.
    count = sum(len(lines) for lines in lines_by_metric.values())
    most_points = max(8, _MOST_POINTS // (2 * count))
    figures = []
    for name, lines in lines_by_metric.items():
        figure = line_chart(
            cut(name, _LONGEST_CELL),
            lines,
            x=x,
            y="number",
            log="loss" in name.lower(),
            most_points=min(250, most_points),
            has_legend=False,
            most_dots=_MOST_DOTS // len(lines),
        )
        figures.append(figure)
    charts = tag("div", *figures, class_="charts overlaid")
    return section(title, charts, note="the colours are those of the table")


def _lines(name: str, runs: Sequence[Run], x: Unit) -> list[Line]:
    lines = []
    for number, run in enumerate(runs):
        curve = run.curves.get(name, {})
        points = sorted(curve.items())
        if x == "seconds":
            points = _timed(curve, run.times)
        if not points:
            continue
        line = Line(
            label=cut(run.name, _LONGEST_CELL),
            # The script of the page finds the lines of a row by the second class.
            style=f"{_colour(number)} run-{number}",
            points=points,
        )
        lines.append(line)
    return lines


def _timed(curve: Curve, times: Curve) -> list[Point]:
    """Return the points of a curve by the seconds after which its steps were done, as far as they are known."""
    if not times:
        return []
    done = sorted(times)
    seconds = [times[step] for step in done]
    # Earlier steps of a resumed run are those of another process.
    steps = [step for step in sorted(curve) if done[0] <= step <= done[-1] - 1]
    # A value of step 9 stands where ten steps are done.
    at = numpy.interp([step + 1 for step in steps], done, seconds)
    return list(zip(at.tolist(), [curve[step] for step in steps], strict=True))


# What was run.


def _origins_section(runs: Sequence[Run]) -> Markup:
    """Return the table of the first difference to the first run, commits, versions and commands.

    A single run has a table of its facts.
    """
    if len(runs) == 1:
        facts = []
        for fact, value in runs[0].origin.items():
            if value:
                facts.append((fact.capitalize(), cut(value)))
        return section("What was run", table(("Fact", "Value"), facts))
    # 1. Facts in which runs differ are columns, all others are a sentence.
    columns = []
    common = []
    for fact in dict.fromkeys(fact for run in runs for fact in run.origin):
        texts = {run.origin.get(fact) for run in runs}
        if len(texts) > 1:
            columns.append(fact)
        elif any(texts):
            common.append(f"{fact}: {cut(texts.pop())}")
    note = None
    if common:
        note = hint(f"The same in all runs: {'; '.join(common)}.")

    # 2. The rows.
    heads = ["Run", "First difference to the first run"]
    heads += [fact.capitalize() for fact in columns]
    rows: list[list[object]] = []
    for number, run in enumerate(runs):
        name = join(_key(number), cut(run.name, _LONGEST_CELL))
        row: list[object] = [name, _first_difference(run, runs[0])]
        row += [cut(run.origin.get(fact, "")) for fact in columns]
        rows.append(row)
    return section("What was run", table(heads, rows), note)


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
