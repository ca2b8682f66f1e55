"""Line charts of a page, as SVG.

Across, everything is a share of the width: lines lie in an inner picture that is stretched, words and dots stand at
percentages. Down, everything is a number of pixels.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from equipoise.extensions.common.page.markup import Markup, figure, hint, join, legend, picture, tag, word_column
from equipoise.extensions.common.page.scales import Point, Scale, make_scale, thin
from equipoise.formats import Unit, format_quantity

__all__ = ["Boundary", "Line", "Mark", "line_chart", "path_through", "stretched", "tick_words"]

# Pixels above the topmost and below the lowest value.
_TOP = 8
_BOTTOM = 24
# Pixels from the axis across to the words below it, and of the row of words below those.
_WORDS = 18
_ROW = 15
# Width of the inner picture in units of its own.
_ACROSS = 1000
# Significant digits of a value across; those of a step must tell neighbours apart.
_DIGITS = {"step": 15}
_DEFAULT_DIGITS = 5
# Words below a chart that find room on a narrow screen.
_FEW_TICKS = 4
# Points of a short line, and lines that a description names.
_FEW = 40
_NAMED = 12


@dataclass(frozen=True, kw_only=True)
class Line:
    """Line of a chart.

    Attributes:
        label: Its name.
        style: Its CSS class, which determines the colour.
        points: Points ordered by x; a y that is no number leaves a gap.
        value: Text beside the name. Default: none.
    """

    label: str
    style: str
    points: Sequence[Point]
    value: str = ""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Mark for an event at one x.

    Attributes:
        x: Its position.
        style: Its CSS class.
        text: Description of the event.
    """

    x: float
    style: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """End of a part of the axis across, such as an epoch.

    Attributes:
        x: Its position.
        text: Name of the part that ends there, in a word or two.
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
    log_across: bool = False,
    most_points: int = 1000,
    has_legend: bool = True,
    most_dots: int = _FEW,
) -> Markup:
    """Draw a figure: its title, the names of its lines with their values, the lines.

    Args:
        title: Name of the measured quantity.
        lines: At least one line. A line without a finite point appears in the legend only.
        x: Unit of the axis across.
        y: Unit of the axis up.
        note: Text beside the title. Default: none.
        marks: Events to mark. Default: none.
        boundaries: Ends of the parts of the axis across; their words stand in a row of their own. Default: none.
        span: First and last value of the axis across. Default: those of the lines.
        height: Height in pixels. Default: 200.
        from_zero: Include zero in the axis up. Default: False.
        log: Allow a logarithmic axis up. Default: False.
        log_across: Allow a logarithmic axis across. Default: False.
        most_points: Maximum number of points of a line; a longer one is thinned. Default: 1000.
        has_legend: Name the lines above the figure. Default: True; a page may name them itself.
        most_dots: Each point of a line with at most this number of points gets a dot. Default: 40.
    """
    names = None
    if has_legend:
        names = _legend(title, lines)
    place = _magnitude if log_across else float
    drawable = [_drawable(line, most_points, place) for line in lines]
    finite = _finite_points(drawable)
    if not finite:
        return figure(title, hint("No value is a finite number."), note=note, names=names)
    # 1. Choose the axes.
    xs = [point[0] for point in finite]
    ys = [point[1] for point in finite]
    across = make_scale([*(span or ()), *xs], x, tight=True, log=log_across, most=6)
    up = make_scale(ys, y, from_zero=from_zero, log=log, most=5)
    # 2. Reserve a row for the words of boundaries.
    inside = [boundary for boundary in boundaries if across.low <= boundary.x <= across.high]
    below = _BOTTOM
    if inside:
        below += _ROW
    # 3. Draw, what lies at the back first.
    plot = picture(
        _description(title, drawable, across),
        _grid(across, up, height),
        *_boundaries(inside, across, height),
        *(_mark(mark, across, height) for mark in marks),
        *(_draw(line, across, up, height, most_dots) for line in drawable),
        class_="plot",
        height=height + below,
        # The script of the page reads these to show values under the pointer.
        data_bottom=height,
        data_x=x,
        data_y=y,
        data_low=f"{across.low:.9g}",
        data_high=f"{across.high:.9g}",
        data_log="yes" if across.log else None,
        data_up=f"{up.low:.9g} {up.high:.9g} {'log' if up.log else 'linear'}",
    )
    # A word stands in the middle of its line, so its baseline lies a little below.
    words = [(format_quantity(tick, up.unit), _down(tick, up, height) + 4) for tick in up.ticks]
    axes = tag("div", word_column(words, height + below), plot, class_="axes")
    return figure(title, axes, note=note, names=names)


def _magnitude(x: float) -> float:
    """Return the place of a value on a logarithmic axis."""
    return math.log10(max(x, sys.float_info.min))


def _drawable(line: Line, most: int, place: Callable[[float], float]) -> Line:
    """Return a thinned line without the points that have no position across."""
    points = []
    for x, y in line.points:
        if math.isfinite(x):
            points.append((float(x), float(y)))
    return Line(label=line.label, style=line.style, points=thin(points, most, place))


def _finite_points(lines: Sequence[Line]) -> list[Point]:
    finite = []
    for line in lines:
        finite += [point for point in line.points if math.isfinite(point[1])]
    return finite


def _description(title: str, lines: Sequence[Line], across: Scale) -> str:
    labels = f"{len(lines)} lines"
    if len(lines) <= _NAMED:
        labels = ", ".join(line.label for line in lines)
    first = format_quantity(across.low, across.unit)
    last = format_quantity(across.high, across.unit)
    return f"{title}: {labels}, from {first} to {last}"


def _legend(title: str, lines: Sequence[Line]) -> Markup | None:
    """Return the names of lines with their values. That of the only one is not said again if it is the title."""
    (first, *others) = lines
    if not others and first.label.lower() == title.lower():
        if not first.value:
            return None
        return legend([(first.style, tag("b", first.value))])
    entries = []
    for line in lines:
        entry: tuple[object, ...] = (line.style, line.label)
        if line.value:
            entry += (" ", tag("b", line.value))
        entries.append(entry)
    return legend(entries)


def _down(value: float, scale: Scale, height: int) -> float:
    """Return the position of a value in pixels from the top."""
    return _TOP + (1 - scale.place(value)) * (height - _TOP)


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _grid(across: Scale, up: Scale, height: int) -> Markup:
    """Draw thin lines for the axis up, words for the axis across."""
    rules = []
    for tick in up.ticks:
        y = f"{_down(tick, up, height):.1f}"
        rules.append(tag("line", x1="0", x2="100%", y1=y, y2=y, class_="rule"))
    return join(*rules, tick_words(across, height + _WORDS))


def tick_words(across: Scale, y: int) -> Markup:
    """Draw the words of an axis across.

    Args:
        across: The scale.
        y: Baseline of the words in pixels.
    """
    words = []
    for index, tick in enumerate(across.ticks):
        share = across.place(tick)
        # The style sheet hides every second one of many where there is little room. The script has others for a part.
        is_odd = index % 2 and len(across.ticks) > _FEW_TICKS
        words.append(
            tag(
                "text",
                format_quantity(tick, across.unit),
                x=_percent(share),
                y=y,
                text_anchor=_text_anchor(share),
                class_="tick odd" if is_odd else "tick",
            )
        )
    return join(*words)


def _text_anchor(share: float) -> str:
    """Return the `text-anchor` with which a word at this share of the width stays inside the picture."""
    if share < 0.04:
        return "start"
    if share > 0.96:
        return "end"
    return "middle"


def _boundaries(boundaries: Sequence[Boundary], across: Scale, height: int) -> list[Markup]:
    """Draw a faint line from top to bottom for each boundary, and its word below the numbers of the axis."""
    drawn = []
    for number, boundary in enumerate(boundaries, start=1):
        share = across.place(boundary.x)
        x = _percent(share)
        line = tag("line", x1=x, x2=x, y1=_TOP, y2=height)
        word = tag(
            "text",
            boundary.text,
            x=x,
            y=height + _WORDS + _ROW,
            text_anchor=_text_anchor(share),
            # Where there is little room, every second word is hidden, and the last one stays.
            class_="odd" if (len(boundaries) - number) % 2 else None,
        )
        drawn.append(tag("g", line, word, class_="boundary"))
    return drawn


def _mark(mark: Mark, across: Scale, height: int) -> Markup:
    x = _percent(across.place(mark.x))
    line = tag("line", x1=x, x2=x, y1=0, y2=height)
    # The dot is large enough for a pointer; the title appears there.
    return tag(
        "g",
        tag("title", mark.text),
        line,
        tag("circle", cx=x, cy=3, r=3),
        class_=f"mark {mark.style}",
    )


def _draw(line: Line, across: Scale, up: Scale, height: int, most_dots: int) -> Markup | None:
    """Draw a line with its dots; return None for a line without a finite point."""
    positions = _positions(line, across, up, height)
    dots = [(x, y) for x, y in positions if y is not None]
    if not dots:
        return None
    # A long line has a dot at its end only.
    if len(dots) > most_dots:
        dots = dots[-1:]
    # Only the path lies in the stretched picture, which would make ellipses of the dots.
    path = tag("path", d=path_through(positions))
    digits = _DIGITS.get(across.unit, _DEFAULT_DIGITS)
    # As the script reads numbers.
    xs = [f"{x:.{digits}g}" for x, _ in line.points]
    ys = [f"{y:.5g}".replace("inf", "Infinity") for _, y in line.points]
    return tag(
        "g",
        stretched(height, path),
        *(tag("circle", cx=_percent(x), cy=f"{y:.1f}", r=2.5) for x, y in dots),
        class_=f"line {line.style}",
        data_label=line.label,
        data_x=" ".join(xs),
        data_y=" ".join(ys),
    )


def _positions(line: Line, across: Scale, up: Scale, height: int) -> list[tuple[float, float | None]]:
    """Return each point as a share of the width and pixels from the top; None where y cannot be drawn."""
    positions: list[tuple[float, float | None]] = []
    for x, y in line.points:
        down = None
        # A logarithmic axis has no place for zero and below.
        has_logarithm = y > 0 or not up.log
        if math.isfinite(y) and has_logarithm:
            down = _down(y, up, height)
        positions.append((across.place(x), down))
    return positions


def stretched(height: int, *content: Markup) -> Markup:
    """Return an inner picture that is as wide as the one around it, whatever its own units are."""
    return tag(
        "svg",
        *content,
        width="100%",
        height=height,
        viewBox=f"0 0 {_ACROSS} {height}",
        preserveAspectRatio="none",
    )


def path_through(positions: Sequence[tuple[float, float | None]]) -> str:
    """Return straight lines from point to point, interrupted at gaps; for a path in a stretched picture.

    Args:
        positions: Shares of the width, and pixels from the top; None in a gap.
    """
    commands = []
    drawing = False
    for x, y in positions:
        if y is not None:
            # Move to the first point after a gap, draw a line to any other.
            command = "L" if drawing else "M"
            commands.append(f"{command}{_ACROSS * x:.5g} {y:.4g}")
        drawing = y is not None
    return "".join(commands)
