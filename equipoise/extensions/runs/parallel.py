"""Parallel coordinates of the runs of a sweep: an axis for each value that differs, a line for each run.

Source: A. Inselberg, The plane with parallel coordinates (The Visual Computer 1, 1985).
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from equipoise.extensions.common.page.charts import path_through, stretched
from equipoise.extensions.common.page.markup import Markup, cut, join, picture, tag
from equipoise.extensions.common.page.scales import Scale
from equipoise.extensions.runs.run import Run
from equipoise.formats import format_number

__all__ = ["parallel_coordinates"]

_LONGEST_WORD = 18
_LEAST_RUNS = 3
# Pixels of the picture; across, axes stand at percentages of its width.
_HEIGHT = 260
_TOP = 30
_BOTTOM = 230
# Share of the width left and right of the first and last axis.
_MARGIN = 0.06


class _Axis(NamedTuple):
    """Axis of one value.

    Attributes:
        name: Its name.
        heights: For each run its place from 0 at the bottom to 1; None where it has no value.
        low: The word at the bottom.
        high: The word at the top.
    """

    name: str
    heights: Sequence[float | None]
    low: str
    high: str


def parallel_coordinates(
    runs: Sequence[Run], keys: Sequence[str], metrics: Sequence[str], style: Callable[[int], str]
) -> Markup | None:
    """Return the picture; None for fewer than three runs, or without two axes.

    Args:
        runs: The runs.
        keys: Keys in which configurations differ.
        metrics: Names of metrics, of which the best values have an axis.
        style: Returns the CSS class of a run by its number.
    """
    if len(runs) < _LEAST_RUNS:
        return None
    axes = []
    for key in keys:
        axes.append(_axis_of_texts(key, [run.configuration.get(key) for run in runs]))
    axes += [_axis_of_metric(name, runs) for name in metrics]
    # A value that all runs share says nothing.
    drawn = [axis for axis in axes if axis is not None]
    if len(drawn) < 2:
        return None
    return _picture(drawn, len(runs), style)


def _axis_of_metric(name: str, runs: Sequence[Run]) -> _Axis | None:
    """Return an axis of the best values of a metric."""
    best = [run.metrics[name].best if name in run.metrics else math.nan for run in runs]
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
        heights = [None if text is None else words.index(text) / (len(words) - 1) for text in texts]
        return _Axis(name, heights, words[0], words[-1])
    return _axis_of_numbers(name, numbers)


def _axis_of_numbers(name: str, numbers: Sequence[float]) -> _Axis | None:
    """Return an axis, a logarithmic one where positive numbers span two magnitudes; None for a single number."""
    finite = [number for number in numbers if math.isfinite(number)]
    if len(set(finite)) < 2:
        return None
    low = min(finite)
    high = max(finite)
    scale = Scale(low, high, (), "number", log=low > 0 and high / low >= 100)
    heights = [scale.place(number) if math.isfinite(number) else None for number in numbers]
    return _Axis(name, heights, format_number(low), format_number(high))


def _picture(axes: Sequence[_Axis], count: int, style: Callable[[int], str]) -> Markup:
    # 1. The lines.
    step = (1 - 2 * _MARGIN) / (len(axes) - 1)
    shares = [_MARGIN + step * place for place in range(len(axes))]
    lines = []
    for number in range(count):
        positions: list[tuple[float, float | None]] = []
        for share, axis in zip(shares, axes, strict=True):
            down = None
            height = axis.heights[number]
            if height is not None:
                down = _BOTTOM - height * (_BOTTOM - _TOP)
            positions.append((share, down))
        path = tag("path", d=path_through(positions))
        # The script of the page finds the lines of a run by the last class.
        lines.append(tag("g", path, class_=f"line {style(number)} run-{number}"))
    # 2. The axes.
    drawn = [_axis(axis, share) for axis, share in zip(axes, shares, strict=True)]
    names = ", ".join(axis.name for axis in axes)
    coordinates = picture(
        f"Parallel coordinates of {count} runs: {names}",
        *drawn,
        # Only lines lie in the picture that is stretched.
        stretched(_HEIGHT, *lines),
        class_="parallel",
        width="100%",
        height=_HEIGHT,
    )
    return tag("figure", coordinates, class_="chart")


def _axis(axis: _Axis, share: float) -> Markup:
    x = f"{100 * share:.2f}%"
    line = tag("line", x1=x, x2=x, y1=_TOP, y2=_BOTTOM, class_="rule")
    name = _word(axis.name, x, 12, "name")
    high = _word(axis.high, x, _TOP - 4)
    low = _word(axis.low, x, _BOTTOM + 14)
    return join(line, name, high, low)


def _word(text: str, x: str, y: int, style: str | None = None) -> Markup:
    return tag("text", cut(text, _LONGEST_WORD), x=x, y=y, text_anchor="middle", class_=style)
