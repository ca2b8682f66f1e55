"""Content of the progress bar as text.

Layout       tracks and metrics as one or two lines of rich text, as wide as the terminal allows
plain_line   the same for a file
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from equipoise.callbacks.progress.track import Track
from equipoise.formats import format_clock, format_number, format_rate, printable

__all__ = ["Layout", "Metrics", "plain_line"]

# Numbers and texts by name.
Metrics = Mapping[str, Any]

# Widths of the bar, in cells.
_WIDE_BARS = (30, 20, 10)
_NARROW_BAR = 6
# Space between columns.
_SPACE = Text("  ")


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

    def compose(
        self,
        tracks: Sequence[Track],
        metrics: Metrics,
        *,
        width: int,
        now: float,
    ) -> Text:
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
            lines += self._lines(index, track, metrics, now)
            # Tracks below the first one have no metrics.
            metrics = {}
        line_break = Text(
            "\n",
            no_wrap=True,
            overflow="crop",
            end="",
        )
        return line_break.join(lines)

    def _lines(self, index: int, track: Track, metrics: Metrics, now: float) -> list[Text]:
        """Format a track as the first of its layouts that fits."""
        name = printable(track.label)
        label = Text(name, "bold")
        values = _metrics(metrics)
        layouts = _layouts(track, values, now)
        # 1. Find the layout, from the last choice on. The last layout is taken even if it does not fit.
        choice = self._choices.get(index, 0)
        last = len(layouts) - 1
        layout = layouts[choice]
        while choice < last and layout.width(label) > self._width:
            choice += 1
            layout = layouts[choice]
        self._choices[index] = choice
        # 2. Draw it.
        bar = self._bar(track, layout.bar)
        parts = [label, bar, *layout.columns]
        visible = filter(None, parts)
        line = _SPACE.join(visible)
        self._shorten(line)
        lines = [line]
        # 3. Put metrics that are not on the line below it.
        last_column = layout.columns[-1]
        if values and last_column is not values:
            second_line = _SPACE + values
            self._shorten(second_line)
            lines.append(second_line)
        return lines

    def _bar(self, track: Track, width: int) -> Text:
        """Draw the bar, with a resolution of half a cell except in ASCII."""
        # 1. Count the cells that are done, in halves.
        fraction = 0.0
        if track.total:
            fraction = track.done / track.total
            fraction = min(1.0, fraction)
        half_cells = int(fraction * width * 2)
        full, half = divmod(half_cells, 2)
        # 2. Draw them, and the rest.
        if self.ascii_only:
            done = "#" * full
            rest = "-" * (width - full)
        else:
            done = "━" * full + "╸" * half
            rest = "─" * (width - full - half)
        colour = "cyan"
        if fraction == 1:
            colour = "green"
        return Text.assemble((done, colour), (rest, "dim"))

    def _shorten(self, line: Text) -> None:
        """Shorten a line in place if it is too long, and mark its end by dots."""
        if line.cell_len <= self._width:
            return
        dots = "…"
        if self.ascii_only:
            dots = "..."
        width = max(0, self._width - len(dots))
        line.truncate(width, overflow="crop")
        visible_dots = dots[: self._width]
        line.append(visible_dots, "dim")


@dataclass(frozen=True)
class _LineLayout:
    """One way to write a line.

    Attributes:
        bar: Width of the bar in cells; 0 for no bar.
        columns: Texts behind the bar. Empty ones are left out.
    """

    bar: int
    columns: tuple[Text, ...]

    def width(self, label: Text) -> int:
        """Return the width of the line in cells."""
        widths = [label.cell_len, self.bar]
        for column in self.columns:
            widths.append(column.cell_len)
        # Empty parts are left out.
        visible = [width for width in widths if width]
        num_spaces = len(visible) - 1
        width_of_spaces = num_spaces * _SPACE.cell_len
        return sum(visible) + width_of_spaces


def _layouts(track: Track, values: Text, now: float) -> list[_LineLayout]:
    """Return the possible layouts of a line, the widest first."""
    # 1. Format the columns.
    count = Text(_count(track))
    rate = _rate(track)
    clock = _clock(track, now)
    short_clock = _short_clock(track, now)
    # 2. Choose the widths of the bar. Without a total there is none.
    wide_bars: tuple[int, ...] = (0,)
    narrow_bar = 0
    if track.total:
        wide_bars = _WIDE_BARS
        narrow_bar = _NARROW_BAR
    # 3. List the layouts. The metrics are in the first ones only.
    layouts = []
    for bar in wide_bars:
        layout = _LineLayout(bar, (count, rate, clock, values))
        layouts.append(layout)
    for bar in wide_bars:
        layout = _LineLayout(bar, (count, rate, clock))
        layouts.append(layout)
    # Then the last of the wide bars, and the narrow one.
    for bar in (wide_bars[-1], narrow_bar):
        layout = _LineLayout(bar, (count, short_clock))
        layouts.append(layout)
    # At last the count alone.
    for bar in (narrow_bar, 0):
        layout = _LineLayout(bar, (count,))
        layouts.append(layout)
    return layouts


def _rate(track: Track) -> Text:
    """Format the rate; empty if it is unknown."""
    text = ""
    if track.rate is not None:
        text = format_rate(track.rate)
    return Text(text, "dim")


def _clock(track: Track, now: float) -> Text:
    """Format the elapsed time, and the remaining time if it is known."""
    elapsed = track.elapsed(now)
    text = format_clock(elapsed)
    remaining = track.remaining
    if remaining is not None:
        remaining_text = format_clock(remaining)
        text = f"{text}<{remaining_text}"
    return Text(text, "dim")


def _short_clock(track: Track, now: float) -> Text:
    """Format the remaining time if it is known, else the elapsed time."""
    remaining = track.remaining
    if remaining is None:
        elapsed = track.elapsed(now)
        text = format_clock(elapsed)
    else:
        text = _time_left(remaining)
    return Text(text, "dim")


def _time_left(remaining: float) -> str:
    text = format_clock(remaining)
    return f"{text} left"


def plain_line(track: Track, metrics: Metrics, *, now: float) -> str:
    """Format a track and metrics as one line for a file, without a bar and control characters.

    Example:
        >>> plain_line(Track("Epoch 1/3", 40, 0.0), {"loss": 0.5}, now=2.0)
        'Epoch 1/3: 0/40 batches, 0:02, loss 0.5000'
    """
    # 1. Count and rate, without the spaces that keep their widths.
    count = _count(track).strip()
    parts = [f"{count} batches"]
    if track.rate is not None:
        rate = format_rate(track.rate)
        parts.append(rate.strip())
    # 2. Times.
    elapsed = track.elapsed(now)
    parts.append(format_clock(elapsed))
    remaining = track.remaining
    if remaining is not None:
        parts.append(_time_left(remaining))
    # 3. Metrics.
    for name, value in metrics.items():
        label = printable(name)
        number = format_number(value)
        parts.append(f"{label} {number}")
    line = ", ".join(parts)
    name_of_track = printable(track.label)
    return f"{name_of_track}: {line}"


def _count(track: Track) -> str:
    total = "?"
    if track.total is not None:
        total = str(track.total)
    # The count keeps its width while it grows.
    digits = len(total)
    return f"{track.done:>{digits}}/{total}"


def _metrics(metrics: Metrics) -> Text:
    """Format metrics as one text; values that are not finite stand out."""
    texts = []
    for name, value in metrics.items():
        style = ""
        if isinstance(value, float) and not math.isfinite(value):
            style = "bold red"
        label = printable(name)
        number = format_number(value)
        text = Text.assemble((f"{label} ", "dim"), (number, style))
        texts.append(text)
    return _SPACE.join(texts)
