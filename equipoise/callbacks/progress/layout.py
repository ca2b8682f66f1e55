"""Content of the progress bar as text.

Layout       tracks and metrics as one or two lines of rich text, as wide as the terminal allows
plain_line   the same for a file
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from equipoise.callbacks.progress.track import Track
from equipoise.formats import format_clock, format_number, format_rate, printable

__all__ = ["Layout", "Metrics", "plain_line"]

# Numbers and texts by name.
Metrics = Mapping[str, Any]
# Widths of the bar, in cells.
_BARS = (30, 20, 10, 6)
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
        return Text("\n", no_wrap=True, overflow="crop", end="").join(lines)

    def _lines(self, index: int, track: Track, metrics: Metrics, now: float) -> list[Text]:
        """Format a track as the first of its layouts that fits."""
        label = Text(printable(track.label), "bold")
        values = _metrics(metrics)
        layouts = _layouts(track, values, now)
        # 1. Draw the first layout that fits, from the last choice on. The last one is taken even if it does not fit.
        # Without a total there are fewer layouts.
        last = len(layouts) - 1
        last_choice = self._choices.get(index, 0)
        for choice in range(min(last_choice, last), last + 1):
            width_of_bar, columns = layouts[choice]
            bar = self._bar(track, width_of_bar)
            # Empty parts take no space.
            parts = filter(None, [label, bar, *columns])
            line = _SPACE.join(parts)
            if line.cell_len <= self._width:
                break
        self._choices[index] = choice
        self._shorten(line)
        lines = [line]
        # 2. Put metrics that are not on the line below it.
        if values and columns[-1] is not values:
            second_line = _SPACE + values
            self._shorten(second_line)
            lines.append(second_line)
        return lines

    def _bar(self, track: Track, width: int) -> Text:
        """Draw the bar, with a resolution of half a cell except in ASCII."""
        # 1. Count the cells that are done, in halves.
        fraction = 0.0
        if track.total:
            fraction = min(1.0, track.done / track.total)
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
        line.truncate(max(0, self._width - len(dots)), overflow="crop")
        line.append(dots[: self._width], "dim")


def _layouts(track: Track, values: Text, now: float) -> list[tuple[int, list[Text]]]:
    """Return the possible layouts of a line, the widest first: the width of the bar, and the columns after it."""
    # 1. The columns. The remaining time is left out where it is unknown.
    count = Text(_count(track))
    speed = ""
    if track.rate is not None:
        speed = format_rate(track.rate)
    rate = Text(speed, "dim")
    elapsed = format_clock(track.elapsed(now))
    clock = Text(elapsed, "dim")
    short_clock = clock
    if track.remaining is not None:
        remaining = format_clock(track.remaining)
        clock = Text(f"{elapsed}<{remaining}", "dim")
        short_clock = Text(f"{remaining} left", "dim")

    # 2. The metrics go to a line of their own first; then count and remaining time stay, then the count alone.
    choices = (
        [count, rate, clock, values],
        [count, rate, clock],
        [count, short_clock],
        [count],
    )
    # Without a total there is no bar.
    widths = _BARS if track.total else (0,)
    layouts = [(width, columns) for columns in choices for width in widths]
    return [*layouts, (0, [count])]


def plain_line(track: Track, metrics: Metrics, *, now: float) -> str:
    """Format a track and metrics as one line for a file, without a bar and control characters.

    Example:
        >>> plain_line(Track("Epoch 1/3", 40, 0.0), {"loss": 0.5}, now=2.0)
        'Epoch 1/3: 0/40 batches, 0:02, loss 0.5000'
    """
    # 1. Count and rate, without the spaces that keep their widths.
    parts = [f"{_count(track).strip()} batches"]
    if track.rate is not None:
        parts.append(format_rate(track.rate).strip())
    # 2. Times.
    parts.append(format_clock(track.elapsed(now)))
    if track.remaining is not None:
        parts.append(f"{format_clock(track.remaining)} left")
    # 3. Metrics.
    parts += [f"{printable(name)} {format_number(value)}" for name, value in metrics.items()]
    return f"{printable(track.label)}: {', '.join(parts)}"


def _count(track: Track) -> str:
    total = "?"
    if track.total is not None:
        total = str(track.total)
    # The count keeps its width while it grows.
    return f"{track.done:>{len(total)}}/{total}"


def _metrics(metrics: Metrics) -> Text:
    """Format metrics as one text; values that are not finite stand out."""
    texts = []
    for name, value in metrics.items():
        style = ""
        if isinstance(value, float) and not math.isfinite(value):
            style = "bold red"
        label = printable(name)
        texts.append(Text.assemble((f"{label} ", "dim"), (format_number(value), style)))
    return _SPACE.join(texts)
