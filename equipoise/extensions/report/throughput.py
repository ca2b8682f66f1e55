"""Training throughput over time, in a bounded number of points."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

__all__ = ["Throughput", "batches_of_step", "samples_of"]

_MOST_STRETCHES = 1024


class _Stretch(NamedTuple):
    """Counts of a stretch of time.

    Attributes:
        end: Time of its end.
        seconds: Its duration, without pauses.
        samples: Samples trained on.
        batches: Batches trained on.
    """

    end: float
    seconds: float
    samples: int
    batches: int


class Throughput:
    """Count samples in stretches of time, which grow longer as a run does.

    All times are seconds of one clock.

    Attributes:
        samples: Samples so far.
        batches: Batches so far.
        seconds: Time that they took.
        has_unknown_size: True if the size of a batch was unknown, so that only batches can be counted.
        interval: Duration of a stretch.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.batches = 0
        self.seconds = 0.0
        self.has_unknown_size = False
        self.interval = 0.2
        self._stretches: list[_Stretch] = []
        # The present stretch: time of its start, None in a pause; samples and batches before it.
        self._since: float | None = None
        self._samples_before = 0
        self._batches_before = 0

    def begin(self, now: float) -> None:
        """Begin a stretch: training continues."""
        self._since = now
        self._samples_before = self.samples
        self._batches_before = self.batches

    def add(self, size: int | None, now: float) -> None:
        """Count a batch, whose size is None if it is unknown."""
        self.batches += 1
        if size is None:
            self.has_unknown_size = True
        else:
            self.samples += size
        if self._since is not None and now - self._since >= self.interval:
            self._close(now)
            self.begin(now)

    def pause(self, now: float) -> None:
        """End a stretch: validation begins, or training ends."""
        if self._since is not None:
            self._close(now)
        self._since = None

    def points(self, start: float, factor: float = 1.0) -> list[tuple[float, float]]:
        """Return the throughput over time: seconds since a start, and samples per second.

        Batches are counted instead of samples if the size of a batch was unknown.

        Args:
            start: Time of second 0.
            factor: Factor for the throughput, such as the number of processes. Default: 1.
        """
        points = []
        for stretch in self._stretches:
            count = stretch.samples
            if self.has_unknown_size:
                count = stretch.batches
            middle = stretch.end - stretch.seconds / 2
            points.append((middle - start, factor * count / stretch.seconds))
        return points

    def progress(self, start: float) -> list[tuple[float, int]]:
        """Return how training went on: seconds since a start, and batches done up to then.

        Args:
            start: Time of second 0.
        """
        points = []
        batches = 0
        for stretch in self._stretches:
            batches += stretch.batches
            points.append((stretch.end - start, batches))
        return points

    def _close(self, now: float) -> None:
        assert self._since is not None
        stretch = _Stretch(
            end=now,
            seconds=now - self._since,
            samples=self.samples - self._samples_before,
            batches=self.batches - self._batches_before,
        )
        self.seconds += stretch.seconds
        # A short stretch without a batch tells nothing.
        if not stretch.batches and stretch.seconds < self.interval:
            return
        if stretch.seconds < self.interval / 2 and self._continues_last():
            stretch = _joined(self._stretches.pop(), stretch)
        if stretch.seconds > 0:
            self._stretches.append(stretch)
        if len(self._stretches) >= _MOST_STRETCHES:
            self._halve()

    def _continues_last(self) -> bool:
        """Return True if the present stretch began where the last one ended."""
        return bool(self._stretches) and self._stretches[-1].end == self._since

    def _halve(self) -> None:
        """Join pairs of stretches; later ones have twice the duration."""
        pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
        self._stretches = [_joined(first, second) for first, second in pairs]
        self.interval *= 2


def _joined(first: _Stretch, second: _Stretch) -> _Stretch:
    return _Stretch(
        end=second.end,
        seconds=first.seconds + second.seconds,
        samples=first.samples + second.samples,
        batches=first.batches + second.batches,
    )


def batches_of_step(strategy: Any, batch: Any) -> Sequence[Any]:
    """Return all batches that this process computed in the last training step.

    A strategy whose hooks receive only the first of them has an attribute `step_batches`.

    Args:
        strategy: The strategy of the trainer, which may be Lightning's.
        batch: The batch that hooks receive.
    """
    return getattr(strategy, "step_batches", ()) or (batch,)


def samples_of(batches: Sequence[Any], size_of: Callable[[Any], int | None]) -> int | None:
    """Return the samples of batches; None if the size of one is unknown."""
    total = 0
    for batch in batches:
        size = size_of(batch)
        if size is None:
            return None
        total += size
    return total
