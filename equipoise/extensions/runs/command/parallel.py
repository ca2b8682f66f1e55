"""Parallel coordinates of runs: an axis for each value that differs, a line for each run.

Source: A. Inselberg, The plane with parallel coordinates (The Visual Computer 1, 1985).
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from equipoise.extensions.common.page.charts import path_through, stretched
from equipoise.extensions.common.page.markup import Markup, cut, join, picture, section, tag
from equipoise.extensions.common.page.scales import Scale, make_scale
from equipoise.extensions.runs.command.shown_runs import COLOURS, ShownRun
from equipoise.extensions.runs.run import Run
from equipoise.formats import format_count

__all__ = ["parallel_section"]

_LONGEST_NAME = 18
_LONGEST_WORD = 14
_LEAST_RUNS = 3
# Pixels of the picture; across, axes stand at percentages of its width.
_HEIGHT = 260
_TOP = 30
_BOTTOM = 230
# Share of the width left and right of the first and last axis.
_MARGIN = 0.06
# Pixels that an axis needs; the picture is wider where there is room.
_AXIS_WIDTH = 140
# Values of an axis that each have a word; more are told by round numbers.
_MOST_WORDS = 8
# Shades of lines, from the best to the worst run, where there are more runs than colours.
_SHADES = 5
# Of its greatest value to its least one, from which on an axis of positive numbers is logarithmic.
_DECADE = 10
# Share of the height between two words beside an axis.
_WORD_HEIGHT = 0.08

# A word, and its place from 0 at the bottom of an axis to 1.
_Mark = tuple[str, float]


class _Axis(NamedTuple):
    """Axis of one value.

    Attributes:
        name: Its name.
        heights: For each run its place from 0 at the bottom to 1; None where it has no value.
        marks: Words at their places.
    """

    name: str
    heights: Sequence[float | None]
    marks: Sequence[_Mark]


def parallel_section(shown: Sequence[ShownRun], keys: Sequence[str], metrics: Sequence[str]) -> Markup | None:
    """Return the section; None for fewer than three runs, or without two axes.

    Args:
        shown: The runs.
        keys: Keys in which configurations differ.
        metrics: Names of metrics, of which the best values have an axis.
    """
    if len(shown) < _LEAST_RUNS:
        return None
    # A run without a result would only bend the axes of the others.
    runs: list[Run | None] = [row.run for row in shown]
    for number, row in enumerate(shown):
        if row.run.metrics.keys().isdisjoint(metrics):
            runs[number] = None
    axes = []
    for key in keys:
        axes.append(_axis_of_texts(key, [_value(key, run) for run in runs]))
    axes += [_axis_of_metric(name, runs) for name in metrics]
    # A value that all runs share says nothing.
    drawn = [axis for axis in axes if axis is not None]
    if len(drawn) < 2:
        return None
    note = "a line for each run, through what differs"
    styles = {number: row.style for number, row in enumerate(shown)}
    if len(shown) > COLOURS and metrics:
        styles = _shades(shown, metrics[0])
        note += f"; the stronger its colour, the better its {metrics[0]}"
    return section("Parallel coordinates", _picture(drawn, styles), note=note)


def _shades(shown: Sequence[ShownRun], metric: str) -> dict[int, str]:
    """Return the CSS class of each run by its place in the order of a metric, the worst first."""
    values = {}
    for number, row in enumerate(shown):
        known = row.run.metrics.get(metric)
        if known is not None and math.isfinite(known.best):
            values[number] = known.best
            if known.mode == "min":
                values[number] = -known.best
    ordered = sorted(range(len(shown)), key=lambda number: values.get(number, -math.inf))
    shades = {}
    for place, number in enumerate(ordered, start=1):
        shades[number] = f"q{(len(shown) - place) * _SHADES // len(shown)}"
    return shades


def _value(key: str, run: Run | None) -> str | None:
    if run is None:
        return None
    return run.configuration.get(key)


def _axis_of_metric(name: str, runs: Sequence[Run | None]) -> _Axis | None:
    """Return an axis of the best values of a metric."""
    best = [run.metrics[name].best if run and name in run.metrics else math.nan for run in runs]
    return _axis_of_numbers(f"best {name}", best)


def _axis_of_texts(name: str, texts: Sequence[str | None]) -> _Axis | None:
    """Return an axis of numbers, or of the texts in their order where one is no number."""
    present = [text for text in texts if text is not None]
    if len(set(present)) < 2:
        return None
    try:
        numbers = [float(text or math.nan) for text in texts]
    except ValueError:
        # Words stand in their order.
        words = sorted(set(present))
        places = {word: number / (len(words) - 1) for number, word in enumerate(words)}
        heights = [None if text is None else places[text] for text in texts]
        return _Axis(name, heights, _apart([*places.items()]))
    return _axis_of_numbers(name, numbers)


def _axis_of_numbers(name: str, numbers: Sequence[float]) -> _Axis | None:
    """Return an axis, a logarithmic one where positive numbers span a decade; None for a single number."""
    finite = sorted({number for number in numbers if math.isfinite(number)})
    if len(finite) < 2:
        return None
    low = finite[0]
    high = finite[-1]
    scale = Scale(low, high, (), "number", log=low > 0 and high / low >= _DECADE)
    heights = [scale.place(number) if math.isfinite(number) else None for number in numbers]
    told = finite
    if len(finite) > _MOST_WORDS:
        told = sorted({low, *_round_numbers(scale), high})
    return _Axis(name, heights, _apart([(format_count(number), scale.place(number)) for number in told]))


def _round_numbers(scale: Scale) -> Sequence[float]:
    """Return round numbers between the ends of a scale: on a logarithmic one powers of ten, in few decades 2, 5 too."""
    if not scale.log:
        return make_scale((scale.low, scale.high), "number", tight=True).ticks
    sizes = [1, 2, 5]
    if scale.high / scale.low >= _DECADE**3:
        sizes = [1]
    first = math.floor(math.log10(scale.low))
    powers = [10.0**power for power in range(first, math.ceil(math.log10(scale.high)) + 1)]
    numbers = [size * power for power in powers for size in sizes]
    return [number for number in numbers if scale.low < number < scale.high]


def _apart(marks: Sequence[_Mark]) -> list[_Mark]:
    """Return marks of which none covers another, from the lowest, which stays as the highest does."""
    *lower, highest = marks
    placed: list[_Mark] = []
    for word, place in lower:
        if not placed or (place - placed[-1][1] >= _WORD_HEIGHT and highest[1] - place >= _WORD_HEIGHT):
            placed.append((word, place))
    return [*placed, highest]


def _picture(axes: Sequence[_Axis], styles: Mapping[int, str]) -> Markup:
    """Draw the axes and, in the order of `styles`, a line for each run by its number."""
    # 1. The lines.
    step = (1 - 2 * _MARGIN) / (len(axes) - 1)
    shares = [_MARGIN + step * place for place in range(len(axes))]
    lines = []
    for number, style in styles.items():
        positions: list[tuple[float, float | None]] = []
        for share, axis in zip(shares, axes, strict=True):
            height = axis.heights[number]
            positions.append((share, None if height is None else _down(height)))
        path = tag("path", d=path_through(positions))
        # The script of the page finds the lines of a run by the last class.
        lines.append(tag("g", path, class_=f"line {style} run-{number}"))
    # 2. The axes.
    drawn = [_axis(axis, share, is_first=axis is axes[0]) for axis, share in zip(axes, shares, strict=True)]
    names = ", ".join(axis.name for axis in axes)
    coordinates = picture(
        f"Parallel coordinates of {len(styles)} runs: {names}",
        # Only lines lie in the picture that is stretched.
        stretched(_HEIGHT, *lines),
        # Words lie over lines.
        *drawn,
        class_="parallel",
        width=_AXIS_WIDTH * len(axes),
        height=_HEIGHT,
    )
    return tag("figure", tag("div", coordinates, class_="scroll"), class_="chart")


def _down(height: float) -> float:
    return _BOTTOM - height * (_BOTTOM - _TOP)


def _axis(axis: _Axis, share: float, *, is_first: bool) -> Markup:
    x = f"{100 * share:.2f}%"
    line = tag("line", x1=x, x2=x, y1=_TOP, y2=_BOTTOM, class_="rule")
    name = tag("text", cut(axis.name, _LONGEST_NAME), x=x, y=12, text_anchor="middle", class_="name")
    # Words stand to the left of their axis; those of the first one would be cut there.
    side = -7
    anchor = "end"
    if is_first:
        side = 7
        anchor = "start"
    words = []
    for word, height in axis.marks:
        down = f"{_down(height) + 4:.1f}"
        words.append(tag("text", cut(word, _LONGEST_WORD), x=x, y=down, dx=side, text_anchor=anchor))
    return join(line, name, *words)
