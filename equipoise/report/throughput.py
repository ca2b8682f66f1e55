"""Training throughput over time, in a bounded number of points."""

__all__ = ["Throughput"]

_MOST = 1024  # stretches that are kept


class Throughput:
    """Counts samples in stretches of time, which grow longer as a run does.

    All times are seconds of one clock.

    Attributes:
        samples: Samples so far; `batches`: batches; `seconds`: the time they took.
        countless: A batch's size could not be told, so batches are what can be counted.
        interval: The length of a stretch.
    """

    def __init__(self) -> None:
        self.samples, self.batches, self.seconds, self.countless = 0, 0, 0.0, False
        self.interval = 0.2
        self._stretches: list[tuple[float, float, int, int]] = []  # end, seconds, samples, batches
        self._since: float | None = None
        self._before = (0, 0)  # samples and batches when the present stretch began

    def begin(self, now: float) -> None:
        """Training goes on from here."""
        self._since, self._before = now, (self.samples, self.batches)

    def add(self, size: int | None, now: float) -> None:
        """A batch is done.

        Args:
            size: Its number of samples; None if nobody can tell.
            now: The time.
        """
        self.batches += 1
        if size is None:
            self.countless = True
        else:
            self.samples += size
        if self._since is not None and now - self._since >= self.interval:
            self._close(now)
            self.begin(now)

    def pause(self, now: float) -> None:
        """Something else begins: validation, the end."""
        if self._since is not None:
            self._close(now)
        self._since = None

    def points(self, start: float, factor: float = 1.0) -> list[tuple[float, float]]:
        """The line: seconds since a start, and so many samples (or batches, where samples cannot be told) per second.

        Args:
            start: Where the line begins.
            factor: What the numbers are multiplied by, for those of several processes. Default: 1.
        """
        return [
            (end - seconds / 2 - start, factor * (batches if self.countless else samples) / seconds)
            for end, seconds, samples, batches in self._stretches
        ]

    def _close(self, now: float) -> None:
        assert self._since is not None
        seconds = now - self._since
        samples, batches = self.samples - self._before[0], self.batches - self._before[1]
        self.seconds += seconds
        if not batches and seconds < self.interval:
            return
        if seconds < self.interval / 2 and self._stretches and self._stretches[-1][0] == self._since:
            last = self._stretches.pop()  # too short to tell anything by itself
            seconds, samples, batches = seconds + last[1], samples + last[2], batches + last[3]
        if seconds > 0:
            self._stretches.append((now, seconds, samples, batches))
        if len(self._stretches) >= _MOST:
            pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
            self._stretches = [(b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]) for a, b in pairs]
            self.interval *= 2
