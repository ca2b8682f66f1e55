"""Track: counts and times of one stage."""

import math
from collections import deque
from typing import NamedTuple

__all__ = ["Track"]

# Seconds over which the rate is measured, so that a slow first batch does not count for long.
_WINDOW = 10.0


class _Sample(NamedTuple):
    """Number of batches done at a time."""

    time: float
    done: int


class Track:
    """Progress and speed of one stage. All times are seconds of one clock.

    Args:
        label: Text at the start of the line.
        total: Number of batches; infinite if unknown.
        now: Time of the start.

    Attributes:
        done: Number of batches done.
        total: Number of batches; None if unknown.
        finished: True at the end of the stage. `rate` is then the mean rate of the whole stage.
    """

    def __init__(self, label: str, total: float, now: float) -> None:
        self.label = label
        self.total: int | None = None
        if math.isfinite(total):
            self.total = int(total)
        self.done = 0
        self.finished = False
        # Seconds of pauses that have ended, and the time at which the present one began.
        self._idle = 0.0
        self._paused: float | None = None
        self._begun = now
        self.skip(0, now)

    def skip(self, done: int, now: float) -> None:
        """Count batches that have no part in the rate, such as those before a resumed run."""
        self.done = done
        self._first = _Sample(self._time(now), done)
        # Samples within the window of the rate, and the last one before it.
        self._samples = deque([self._first])

    def update(self, done: int, now: float) -> None:
        """Set the number of batches done, unless the clock is stopped."""
        if self._paused is not None:
            return
        self.done = done
        last = _Sample(self._time(now), done)
        self._samples.append(last)
        window_start = last.time - _WINDOW
        while len(self._samples) > 2 and self._samples[0].time < window_start:
            self._samples.popleft()

    def pause(self, now: float) -> None:
        """Stop the clock until `resume`."""
        self._paused = now

    def resume(self, now: float) -> None:
        """Start the clock again. The time since `pause` does not count."""
        if self._paused is not None:
            self._idle += now - self._paused
            self._paused = None

    def finish(self, now: float) -> None:
        """Stop the clock at the end of the stage."""
        self._paused = now
        self.finished = True

    def elapsed(self, now: float) -> float:
        """Return the seconds since the start, without pauses."""
        return max(0.0, self._time(now) - self._begun)

    def _time(self, now: float) -> float:
        """Return the time of a clock that stands still in pauses."""
        if self._paused is not None:
            now = self._paused
        return now - self._idle

    @property
    def rate(self) -> float | None:
        """Batches per second of the last 10 seconds, or of a finished stage; None if unknown."""
        first = self._samples[0]
        if self.finished:
            first = self._first
        last = self._samples[-1]
        seconds = last.time - first.time
        batches = last.done - first.done
        if seconds <= 0 or batches <= 0:
            return None
        return batches / seconds

    @property
    def remaining(self) -> float | None:
        """Seconds to the end at the present rate; None if the rate or the total is unknown."""
        rate = self.rate
        if rate is None or self.total is None or self.finished:
            return None
        return max(0, self.total - self.done) / rate
