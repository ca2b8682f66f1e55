"""Line charts of the report, as SVG.

Across, everything is a share of the width: lines lie in an inner picture that is stretched, words and dots stand at
percentages. Down, everything is a number of pixels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.report.page.markup import Markup, join, tag
from equipoise.report.page.scales import Point, Scale, Unit, format_value, make_scale, thin

__all__ = ["Boundary", "Line", "Mark", "line_chart"]

_TOP, _BOTTOM = 8, 24  # pixels above the topmost and below the lowest value
_ROW = 15  # pixels of the words below boundaries
_ACROSS = 1000  # units of the inner picture
_DIGITS = {"step": 15}  # of a value across; where not said otherwise 5
_FEW = 40  # points up to which each has a dot


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line.

    Attributes:
        label: Its name.
        style: Its class, which says its colour.
        points: Ordered by x; where y is no number there is a gap.
        value: What is told beside its name.
    """

    label: str
    style: str
    points: Sequence[Point]
    value: str = ""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something that happened at one x.

    Attributes:
        x: Where.
        style: Its class.
        text: What.
    """

    x: float
    style: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """The end of a part of the axis across, such as an epoch.

    Attributes:
        x: Where.
        text: What ends there, in a word or two.
    """

    x: float
    text: str


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x: Unit,
    y: Unit,
    note: str = "",
    marks: Sequence[Mark] = (),
    boundaries: Sequence[Boundary] = (),
    span: tuple[float, float] | None = None,
    height: int = 200,
    from_zero: bool = False,
    log: bool = False,
    most_points: int = 1000,
) -> Markup:
    """Draws a figure: its title, the names of its lines with their values, the lines.

    Args:
        title: What is measured.
        lines: At least one; those without a finite point are named only.
        x: What is counted across.
        y: What is counted up.
        note: What stands beside the title. Default: nothing.
        marks: What happened meanwhile. Default: nothing.
        boundaries: Which parts the axis across has; their words stand in a row of their own. Default: none.
        span: Where the axis across begins and ends. Default: where the lines do.
        height: In pixels. Default: 200.
        from_zero: Whether the axis up begins at zero. Default: False.
        log: Whether that axis may be logarithmic. Default: False.
        most_points: To how many points a line is thinned. Default: 1000.
    """
    head = tag("figcaption", tag("h3", title, tag("span", note, class_="note") if note else None), _legend(lines))
    lines = [Line(label=one.label, style=one.style, points=_sane(one.points, most_points)) for one in lines]
    finite = [point for line in lines for point in line.points if math.isfinite(point[1])]
    if not finite:
        return tag("figure", head, tag("p", "No value is a finite number.", class_="hint"), class_="chart")
    across = make_scale([*(span or ()), *(point[0] for point in finite)], x, tight=True, most=6)
    up = make_scale([point[1] for point in finite], y, from_zero=from_zero, log=log, most=5)
    first, last = format_value(across.low, x), format_value(across.high, x)
    inside = [each for each in boundaries if across.low <= each.x <= across.high]
    below = _BOTTOM + (_ROW if inside else 0)
    picture = tag(
        "svg",
        tag("title", f"{title}: {', '.join(line.label for line in lines)}, from {first} to {last}"),
        _grid(across, up, height),
        *(_boundary(each, across, height) for each in inside),
        *(_mark(mark, across, height) for mark in marks),
        *(_draw(line, across, up, height) for line in lines),
        class_="plot",
        role="img",
        height=height + below,
        data_bottom=height,
        data_x=x,
        data_y=y,
        data_low=f"{across.low:.9g}",
        data_high=f"{across.high:.9g}",
    )
    return tag("figure", head, tag("div", _labels(up, height, below), picture, class_="axes"), class_="chart")


def _sane(points: Sequence[Point], most: int) -> list[Point]:
    """Thinned, and without points that have no place across."""
    return thin([(float(x), float(y)) for x, y in points if math.isfinite(x)], most)


def _legend(lines: Sequence[Line]) -> Markup | None:
    entries = [
        tag("li", tag("i", class_=f"key {line.style}"), line.label, " " if line.value else None, tag("b", line.value))
        for line in lines
    ]
    return tag("ul", *entries, class_="legend")


def _down(value: float, scale: Scale, height: int) -> float:
    return _TOP + (1 - scale.place(value)) * (height - _TOP)


def _labels(up: Scale, height: int, below: int) -> Markup:
    """The axis up: a column of its own, as wide as its words."""
    words = [format_value(tick, up.unit) for tick in up.ticks]
    width = 10 + round(6.3 * max((len(word) for word in words), default=0))
    texts = [
        tag("text", word, x=width - 8, y=f"{_down(tick, up, height) + 4:.1f}", text_anchor="end")
        for tick, word in zip(up.ticks, words, strict=True)
    ]
    return tag("svg", *texts, class_="labels", width=width, height=height + below, aria_hidden="true")


def _grid(across: Scale, up: Scale, height: int) -> Markup:
    """Thin lines for the axis up, words for the axis across."""
    rules = [
        tag("line", x1="0", x2="100%", y1=f"{down:.1f}", y2=f"{down:.1f}", class_="rule")
        for down in (_down(tick, up, height) for tick in up.ticks)
    ]
    words = []
    for index, tick in enumerate(across.ticks):
        place = across.place(tick)
        anchor = "start" if place < 0.04 else "end" if place > 0.96 else "middle"
        style = "odd" if index % 2 else None  # left out where there is little room
        word = format_value(tick, across.unit)
        words.append(tag("text", word, x=f"{100 * place:.2f}%", y=height + 18, text_anchor=anchor, class_=style))
    return join(*rules, *words)


def _boundary(boundary: Boundary, across: Scale, height: int) -> Markup:
    """A faint line from top to bottom, and a word below the numbers of the axis, which ends where the line does."""
    share = across.place(boundary.x)
    place = f"{100 * share:.2f}%"
    anchor = "start" if share < 0.04 else "end" if share > 0.96 else "middle"
    line = tag("line", x1=place, x2=place, y1=_TOP, y2=height)
    word = tag("text", boundary.text, x=place, y=height + 18 + _ROW, text_anchor=anchor)
    return tag("g", line, word, class_="boundary")


def _mark(mark: Mark, across: Scale, height: int) -> Markup:
    place = f"{100 * across.place(mark.x):.2f}%"
    line = tag("line", x1=place, x2=place, y1=0, y2=height)
    return tag("g", tag("title", mark.text), line, tag("circle", cx=place, cy=3, r=3), class_=f"mark {mark.style}")


def _draw(line: Line, across: Scale, up: Scale, height: int) -> Markup | None:
    places = [
        (across.place(x), _down(y, up, height) if math.isfinite(y) and not (up.log and y <= 0) else None)
        for x, y in line.points
    ]
    ends = [(x, y) for x, y in places if y is not None]
    if not ends:
        return None
    dots = ends if len(ends) <= _FEW else ends[-1:]
    stretched = tag(
        "svg",
        tag("path", d=_path(places)),
        width="100%",
        height=height,
        viewBox=f"0 0 {_ACROSS} {height}",
        preserveAspectRatio="none",
    )
    return tag(
        "g",
        stretched,
        *(tag("circle", cx=f"{100 * x:.2f}%", cy=f"{y:.1f}", r=2.5) for x, y in dots),
        class_=f"line {line.style}",
        data_label=line.label,
        data_x=" ".join(f"{x:.{_DIGITS.get(across.unit, 5)}g}" for x, _ in line.points),
        data_y=" ".join(f"{y:.5g}" for _, y in line.points),
    )


def _path(places: Sequence[tuple[float, float | None]]) -> str:
    """Straight from point to point, broken where there is none."""
    steps, drawing = [], False
    for x, y in places:
        if y is not None:
            steps.append(f"{'L' if drawing else 'M'}{_ACROSS * x:.5g} {y:.4g}")
        drawing = y is not None
    return "".join(steps)
