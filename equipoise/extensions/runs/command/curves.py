"""The curves of all runs over each other, by step and by time."""

from collections.abc import Sequence

import numpy

from equipoise.extensions.common.page.charts import Line, line_chart
from equipoise.extensions.common.page.markup import Markup, cut, hint, section, tag
from equipoise.extensions.common.page.scales import Point
from equipoise.extensions.report.curve_names import is_learning_rate
from equipoise.extensions.runs.command.shown_runs import COLOURS, ShownRun
from equipoise.extensions.runs.run import Curve
from equipoise.formats import Unit

__all__ = ["curves_section"]

# What a page shows at most, so that it stays below 2 MB.
_MOST_POINTS = 26_000
# Dots of a chart, if each point of its lines has one.
_MOST_DOTS = 400
_LONGEST_NAME = 80
# Texts for the place of curves.
_NOTHING = {
    "step": "No run has logged a metric.",
    "seconds": "No run knows its times: RunReport() notes them.",
}


def curves_section(title: str, shown: Sequence[ShownRun], metrics: Sequence[str], x: Unit, note: str = "") -> Markup:
    """Draw each metric of all runs over each other; the note stands beside the title."""
    # 1. The lines of each figure.
    lines_by_metric: dict[str, list[Line]] = {}
    for name in metrics:
        lines = _lines(name, shown, x)
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
            cut(name, _LONGEST_NAME),
            lines,
            x=x,
            y="number",
            # Learning rates of several runs span decades.
            log="loss" in name.lower() or is_learning_rate(name),
            most_points=min(250, most_points),
            has_legend=False,
            most_dots=_MOST_DOTS // len(lines),
        )
        figures.append(figure)
    style = "charts overlaid"
    if len(shown) > COLOURS:
        style += " many"
    return section(title, tag("div", *figures, class_=style), note=note)


def _lines(name: str, shown: Sequence[ShownRun], x: Unit) -> list[Line]:
    lines = []
    for number, row in enumerate(shown):
        curve = row.run.curves.get(name, {})
        points = sorted(curve.items())
        if x == "seconds":
            points = _timed(curve, row.run.times)
        if not points:
            continue
        line = Line(
            label=row.name_of(_LONGEST_NAME),
            # The script of the page finds the lines of a row by the last class.
            style=f"{row.style} run-{number}",
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
