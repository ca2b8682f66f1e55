"""Content of the progress bar: its columns and texts.

Track           counts and times of one stage
LatestValues    metrics as plain numbers, read without waiting
Layout          tracks and metrics as one or two lines of rich text, as wide as the terminal allows
plain_line      the same for a file
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from typing import Any, Protocol

import torch
from rich.text import Text
from torch import Tensor

__all__ = ["LatestValues", "Layout", "Track", "format_time", "format_value", "plain_line"]

_WINDOW = 10.0  # seconds over which the rate is taken: a slow first batch is soon forgotten
_WIDE_BARS, _NARROW_BAR = (30, 20, 10), 6  # widths of the bar, in cells


class Track:
    """How far one stage has come, and how fast it goes. All times are seconds of one clock.

    Args:
        label: What stands in front of the line.
        total: Its batches; infinite if unknown.
        now: The time it begins.

    Attributes:
        done: Batches done.
        total: Its batches; None if unknown.
        begun: When it began, the time of pauses added.
        finished: Whether it is over. Its rate is then that of its whole time.
    """

    def __init__(self, label: str, total: float, now: float) -> None:
        self.label = label
        self.total = int(total) if math.isfinite(total) else None
        self.done = 0
        self.finished = False
        self.begun = now
        self._paused: float | None = None
        self._samples: deque[tuple[float, int]] = deque([(now, 0)])
        self._first = self._samples[0]

    def skip(self, done: int, now: float) -> None:
        """Takes batches as done that say nothing of the speed, such as those before a resumed run."""
        self.done, self._first = done, (now, done)
        self._samples = deque([self._first])

    def update(self, done: int, now: float) -> None:
        """Notes how many batches are done now, unless the clock is stopped."""
        if self._paused is not None:
            return
        self.done = done
        self._samples.append((now, done))
        while len(self._samples) > 2 and self._samples[0][0] < now - _WINDOW:
            self._samples.popleft()

    def pause(self, now: float) -> None:
        """Stops the clock, until `go_on`."""
        self._paused = now

    def go_on(self, now: float) -> None:
        """Starts the clock again; the time since `pause` counts for nothing."""
        if self._paused is not None:
            gap, self._paused = now - self._paused, None
            self.begun += gap
            self._first = (self._first[0] + gap, self._first[1])
            self._samples = deque((time + gap, done) for time, done in self._samples)

    def finish(self, now: float) -> None:
        """Stops the clock for good."""
        self._paused, self.finished = now, True

    def elapsed(self, now: float) -> float:
        """Seconds spent on it."""
        return max(0.0, (now if self._paused is None else self._paused) - self.begun)

    @property
    def rate(self) -> float | None:
        """Batches per second: of late, or all in all once it is finished. None if nothing is known."""
        start, first = self._first if self.finished else self._samples[0]
        end, last = self._samples[-1]
        return (last - first) / (end - start) if end > start and last > first else None

    @property
    def remaining(self) -> float | None:
        """Seconds still to go at the present rate; None if that or the total is unknown."""
        rate = self.rate
        return None if rate is None or self.total is None or self.finished else max(0, self.total - self.done) / rate


class _Event(Protocol):
    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


def _record_event(device: torch.device) -> _Event:
    event: _Event = torch.cuda.current_stream(device).record_event()
    return event


class LatestValues:
    """Metrics as plain numbers, without waiting for a device.

    A value on CUDA is copied to pinned memory behind whatever is queued there, and shown from the first reading that
    finds the copy done. Until then the last one is shown: where the device keeps up, a value is at most one reading
    old. Values on the host are read at once.

    Args:
        record_event: Marks the present end of a device's queue. Default: an event on its current stream.
        pin_memory: Whether copies go to page-locked memory, without which they wait. Default: True.

    Example:
        >>> LatestValues().read({"loss": torch.tensor(0.5), "step": 3})
        {'loss': 0.5, 'step': 3}
    """

    def __init__(
        self, *, record_event: Callable[[torch.device], _Event] = _record_event, pin_memory: bool = True
    ) -> None:
        self._record_event = record_event
        self._pin_memory = pin_memory
        self._copies: dict[str, Tensor] = {}
        self._latest: dict[str, float] = {}
        self._flights: dict[torch.device, tuple[_Event, list[str]]] = {}

    def read(self, values: Mapping[str, Any], *, wait: bool = False) -> dict[str, Any]:
        """The newest numbers there are.

        Args:
            values: Tensors of one element, numbers or texts by name.
            wait: Wait for the copies begun here: the numbers are those given. Default: False.

        Returns:
            The same names in the same order, less those of which no copy has come back yet.
        """
        self._land(wait=wait)
        remote = {name: value for name, value in values.items() if isinstance(value, Tensor) and value.is_cuda}
        self._start(remote)
        if wait:
            self._land(wait=True)
        shown: dict[str, Any] = {}
        for name, value in values.items():
            if name not in remote:
                shown[name] = float(value) if isinstance(value, Tensor) else value
            elif name in self._latest:
                shown[name] = self._latest[name]
        return shown

    def _land(self, *, wait: bool) -> None:
        """Takes in what has arrived."""
        for device, (event, names) in list(self._flights.items()):
            if wait:
                event.synchronize()
            elif not event.query():
                continue
            del self._flights[device]
            self._latest.update((name, float(self._copies[name])) for name in names)

    def _start(self, values: Mapping[str, Tensor]) -> None:
        """Begins copies from every device that has none under way: a slow device's queue does not fill with them."""
        for device in dict.fromkeys(value.device for value in values.values()):
            if device in self._flights:
                continue
            names = [name for name, value in values.items() if value.device == device]
            for name in names:
                self._copy(name, values[name].detach())
            self._flights[device] = (self._record_event(device), names)

    def _copy(self, name: str, value: Tensor) -> None:
        copy = self._copies.get(name)
        if copy is None or copy.dtype != value.dtype:
            copy = self._copies[name] = torch.empty((), dtype=value.dtype, pin_memory=self._pin_memory)
        copy.copy_(value.reshape(()), non_blocking=True)


class Layout:
    """Tracks and metrics as lines that fit a width.

    Of the first line's parts as many are shown as fit: bar, count, rate, times. Metrics follow on it, or have a line of
    their own. What was once left out for a width stays out, so that nothing jumps.

    Args:
        ascii_only: Whether the terminal knows no more than ASCII. Default: False.
    """

    def __init__(self, *, ascii_only: bool = False) -> None:
        self.ascii_only = ascii_only
        self._width = 0
        self._choices: dict[int, int] = {}

    def compose(self, tracks: Sequence[Track], metrics: Mapping[str, Any], *, width: int, now: float) -> Text:
        """Draws the tracks, one below the other, with the metrics at the first.

        Args:
            tracks: The stages under way, outermost first.
            metrics: What to show behind the first, in order.
            width: Cells per line.
            now: The time.
        """
        if width != self._width:
            self._width, self._choices = width, {}
        lines: list[Text] = []
        for index, track in enumerate(tracks):
            lines += self._lines(index, track, {} if index else metrics, now)
        return Text("\n", no_wrap=True, overflow="crop", end="").join(lines)

    def _lines(self, index: int, track: Track, metrics: Mapping[str, Any], now: float) -> list[Text]:
        label, values = Text(_printable(track.label), "bold"), Text("  ").join(starmap(_metric, metrics.items()))
        elapsed, left = format_time(track.elapsed(now)), track.remaining
        rate = Text("" if track.rate is None else format_rate(track.rate), "dim")
        clock = Text(elapsed if left is None else f"{elapsed}<{format_time(left)}", "dim")
        short = Text(elapsed if left is None else f"{format_time(left)} left", "dim")
        count = Text(_count(track))
        wide, narrow = (_WIDE_BARS, _NARROW_BAR) if track.total else ((0,), 0)
        choices = [(bar, [count, rate, clock, values]) for bar in wide]  # best first; from here on values have a line
        choices += [(bar, [count, rate, clock]) for bar in wide]
        choices += [(wide[-1], [count, short]), (narrow, [count, short]), (narrow, [count]), (0, [count])]
        choice = self._choices.get(index, 0)
        while choice < len(choices) - 1 and _width(label, *choices[choice]) > self._width:
            choice += 1
        self._choices[index] = choice
        bar, parts = choices[choice]
        line = Text("  ").join(part for part in (label, self._bar(track, bar), *parts) if part)
        own_line = [self._cut(Text("  ").append(values))] if values and parts[-1] is not values else []
        return [self._cut(line), *own_line]

    def _bar(self, track: Track, width: int) -> Text:
        """The bar itself, to half a cell where there are characters for it."""
        share = min(1.0, track.done / track.total) if track.total else 0.0
        full, half = divmod(int(share * width * 2), 2)
        done, rest = (
            ("#" * full, "-" * (width - full))
            if self.ascii_only
            else ("━" * full + "╸" * half, "─" * (width - full - half))
        )
        return Text.assemble((done, "green" if share == 1 else "cyan"), (rest, "dim"))

    def _cut(self, line: Text) -> Text:
        """Cuts what is too long, visibly."""
        if line.cell_len > self._width:
            dots = "..." if self.ascii_only else "…"
            line.truncate(max(0, self._width - len(dots)), overflow="crop")
            line.append(dots[: self._width], "dim")
        return line


def plain_line(track: Track, metrics: Mapping[str, Any], *, now: float) -> str:
    """One line for a file: no bar, no control characters, as long as it needs to be.

    Example:
        >>> plain_line(Track("Epoch 1/3", 40, 0.0), {"loss": 0.5}, now=2.0)
        'Epoch 1/3: 0/40 batches, 0:02, loss 0.5000'
    """
    parts = [f"{_count(track).strip()} batches"]
    parts += [format_rate(track.rate).strip()] if track.rate is not None else []
    parts += [format_time(track.elapsed(now))]
    parts += [f"{format_time(track.remaining)} left"] if track.remaining is not None else []
    parts += [f"{_printable(name)} {format_value(value)}" for name, value in metrics.items()]
    return f"{_printable(track.label)}: {', '.join(parts)}"


def format_value(value: Any) -> str:
    """A number with four significant digits, in as constant a width as can be; anything else as its text.

    Example:
        >>> [format_value(value) for value in (0.5, 12, 1234.5, 1.5e-7)]
        ['0.5000', '12', '1234', '1.500e-07']
    """
    if not isinstance(value, float):
        return _printable(str(value))
    if not math.isfinite(value) or value == 0:
        return f"{value:.1f}"
    return f"{value:#.4g}".rstrip(".") if 1e-4 <= abs(value) < 1e5 else f"{value:.3e}"


def format_time(seconds: float) -> str:
    """Hours, minutes and seconds, the hours only if there are any."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def format_rate(rate: float) -> str:
    """Batches per second, or seconds per batch where that is more than one, in a constant width."""
    value, unit = (rate, "it/s") if rate >= 1 else (1 / rate, "s/it")
    return f"{value:{'4.0f' if value >= 99.95 else '4.1f' if value >= 9.995 else '4.2f'}} {unit}"


def _count(track: Track) -> str:
    total = "?" if track.total is None else str(track.total)
    return f"{track.done:>{len(total)}}/{total}"


def _metric(name: str, value: Any) -> Text:
    broken = isinstance(value, float) and not math.isfinite(value)
    return Text.assemble((f"{_printable(name)} ", "dim"), (format_value(value), "bold red" if broken else ""))


def _width(label: Text, bar: int, parts: list[Text]) -> int:
    widths = [width for width in (label.cell_len, bar, *(part.cell_len for part in parts)) if width]
    return sum(widths) + 2 * (len(widths) - 1)


def _printable(text: str) -> str:
    """The text without line breaks and control characters."""
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)
