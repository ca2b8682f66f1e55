"""Content of the progress bar as text.

Layout       tracks and metrics as one or two lines of rich text, as wide as the terminal allows
plain_line   the same for a file
"""

import math
from collections.abc import Mapping, Sequence
from itertools import starmap
from typing import Any

from rich.text import Text

from equipoise.callbacks.progress.formatting import format_rate, format_time, format_value, printable
from equipoise.callbacks.progress.track import Track

__all__ = ["Layout", "plain_line"]

# Widths of the bar, in cells.
_WIDE_BARS = (30, 20, 10)
_NARROW_BAR = 6


class Layout:
    """Format tracks and metrics as lines that fit a width.

    The first line shows as many of its columns as fit: bar, count, rate, times. Metrics follow on it, or on a second
    line. A column that was once left out for a width stays out, so that the line does not jump.

    Args:
        ascii_only: Use no characters beyond ASCII. Default: False.
    """

    def __init__(self, *, ascii_only: bool = False) -> None:
        self.ascii_only = ascii_only
        self._width = 0
        # For each track, the index of its layout among the possible ones.
        self._choices: dict[int, int] = {}

    def compose(self, tracks: Sequence[Track], metrics: Mapping[str, Any], *, width: int, now: float) -> Text:
        """Format the tracks, one below the other, with the metrics at the first.

        Args:
            tracks: The present stages, outermost first.
            metrics: Metrics of the first track, in order.
            width: Width of a line in cells.
            now: The present time.
        """
        if width != self._width:
            self._width = width
            self._choices = {}
        lines: list[Text] = []
        for index, track in enumerate(tracks):
            track_metrics = metrics if index == 0 else {}
            lines += self._lines(index, track, track_metrics, now)
        return Text("\n", no_wrap=True, overflow="crop", end="").join(lines)

    def _lines(self, index: int, track: Track, metrics: Mapping[str, Any], now: float) -> list[Text]:
        """Format a track as the first of its layouts that fits."""
        label = Text(printable(track.label), "bold")
        values = Text("  ").join(starmap(_metric, metrics.items()))
        layouts = _layouts(track, values, now)
        # 1. Find the layout, from the last choice on.
        choice = self._choices.get(index, 0)
        while choice < len(layouts) - 1:
            bar, columns = layouts[choice]
            if _width(label, bar, columns) <= self._width:
                break
            choice += 1
        self._choices[index] = choice
        # 2. Draw it.
        bar, columns = layouts[choice]
        parts = [label, self._bar(track, bar), *columns]
        line = Text("  ").join(part for part in parts if part)
        lines = [self._shorten(line)]
        # 3. Put metrics that are not on the line below it.
        if values and columns[-1] is not values:
            lines.append(self._shorten(Text("  ").append(values)))
        return lines

    def _bar(self, track: Track, width: int) -> Text:
        """Draw the bar, with a resolution of half a cell except in ASCII."""
        fraction = 0.0
        if track.total:
            fraction = min(1.0, track.done / track.total)
        full, half = divmod(int(fraction * width * 2), 2)
        if self.ascii_only:
            done = "#" * full
            rest = "-" * (width - full)
        else:
            done = "━" * full + "╸" * half
            rest = "─" * (width - full - half)
        colour = "green" if fraction == 1 else "cyan"
        return Text.assemble((done, colour), (rest, "dim"))

    def _shorten(self, line: Text) -> Text:
        """Shorten a line that is too long, and mark its end by dots."""
        if line.cell_len > self._width:
            dots = "..." if self.ascii_only else "…"
            line.truncate(max(0, self._width - len(dots)), overflow="crop")
            line.append(dots[: self._width], "dim")
        return line


def _layouts(track: Track, values: Text, now: float) -> list[tuple[int, list[Text]]]:
    """Return the possible layouts of a line, the widest first: the width of the bar, and the columns behind it."""
    # 1. Format the columns.
    elapsed = format_time(track.elapsed(now))
    remaining = track.remaining
    clock = Text(elapsed, "dim")
    short_clock = Text(elapsed, "dim")
    if remaining is not None:
        clock = Text(f"{elapsed}<{format_time(remaining)}", "dim")
        short_clock = Text(f"{format_time(remaining)} left", "dim")
    rate = Text("", "dim")
    if track.rate is not None:
        rate = Text(format_rate(track.rate), "dim")
    count = Text(_count(track))
    # 2. Choose the widths of the bar. Without a total there is none.
    wide_bars: tuple[int, ...] = (0,)
    narrow_bar = 0
    if track.total:
        wide_bars = _WIDE_BARS
        narrow_bar = _NARROW_BAR
    # 3. List the layouts. The metrics are in the first ones only.
    layouts = [(bar, [count, rate, clock, values]) for bar in wide_bars]
    layouts += [(bar, [count, rate, clock]) for bar in wide_bars]
    layouts.append((wide_bars[-1], [count, short_clock]))
    layouts.append((narrow_bar, [count, short_clock]))
    layouts.append((narrow_bar, [count]))
    layouts.append((0, [count]))
    return layouts


def plain_line(track: Track, metrics: Mapping[str, Any], *, now: float) -> str:
    """Format a track and metrics as one line for a file, without a bar and control characters.

    Example:
        >>> plain_line(Track("Epoch 1/3", 40, 0.0), {"loss": 0.5}, now=2.0)
        'Epoch 1/3: 0/40 batches, 0:02, loss 0.5000'
    """
    parts = [f"{_count(track).strip()} batches"]
    rate = track.rate
    if rate is not None:
        parts.append(format_rate(rate).strip())
    elapsed = track.elapsed(now)
    parts.append(format_time(elapsed))
    remaining = track.remaining
    if remaining is not None:
        parts.append(f"{format_time(remaining)} left")
    for name, value in metrics.items():
        parts.append(f"{printable(name)} {format_value(value)}")
    text = ", ".join(parts)
    return f"{printable(track.label)}: {text}"


def _count(track: Track) -> str:
    total = "?" if track.total is None else str(track.total)
    # The count keeps its width while it grows.
    digits = len(total)
    return f"{track.done:>{digits}}/{total}"


def _metric(name: str, value: Any) -> Text:
    style = ""
    if isinstance(value, float) and not math.isfinite(value):
        style = "bold red"
    return Text.assemble((f"{printable(name)} ", "dim"), (format_value(value), style))


def _width(label: Text, bar: int, parts: list[Text]) -> int:
    """Return the width of a line in cells: its columns, and two cells between each two of them."""
    widths = [label.cell_len, bar]
    widths += [part.cell_len for part in parts]
    columns = [width for width in widths if width]
    return sum(columns) + 2 * (len(columns) - 1)
