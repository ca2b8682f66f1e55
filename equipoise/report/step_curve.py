"""A curve over steps with a bounded number of points; it becomes coarser as it grows."""

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["StepCurve"]

_MOST_BUCKETS = 256


class StepCurve:
    """Values by steps, thinned where there are many.

    The steps are divided into buckets of equal width. Of the points of a bucket four at most stay: the least value, the
    greatest, the last, and the first that is not a number. The width begins at 1 step, and doubles whenever there are
    more than 256 buckets, so a curve holds 1024 points at most however long the run.

    Attributes:
        width: Steps of a bucket.

    Example:
        >>> curve = StepCurve()
        >>> for step in range(100_000):
        ...     curve.add(step, 1.0 if step == 617 else 0.0)
        >>> len(curve.points()) <= 1024, curve.points()[617]
        (True, 1.0)
    """

    def __init__(self) -> None:
        self.width = 1
        self._buckets: dict[int, dict[int, float]] = {}  # by the number of the bucket: values by step

    def add(self, step: int, value: float) -> None:
        """Adds a value.

        Args:
            step: Where it stands. A value that stands there already is replaced.
            value: The value; it may be infinite or no number.
        """
        number = step // self.width
        bucket = self._buckets.setdefault(number, {})
        bucket[step] = value
        if len(bucket) > 2:
            self._buckets[number] = _thin(bucket)
        while len(self._buckets) > _MOST_BUCKETS:
            self._widen()

    def points(self) -> dict[int, float]:
        """Return the values by step, in the order of steps."""
        together = {step: value for bucket in self._buckets.values() for step, value in bucket.items()}
        return dict(sorted(together.items()))

    def drop_from(self, step: int) -> None:
        """Forget the values at a step and beyond it."""
        kept = {at: value for at, value in self.points().items() if at < step}
        self._fill(kept)

    def state_dict(self) -> dict[str, Any]:
        """Return the width of buckets and the points."""
        points = self.points()
        return {"width": self.width, "steps": list(points), "values": list(points.values())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the points of an earlier process."""
        self.width = int(state_dict["width"])
        self._fill(dict(zip(state_dict["steps"], state_dict["values"], strict=True)))

    def _widen(self) -> None:
        self.width *= 2
        self._fill(self.points())

    def _fill(self, points: Mapping[int, float]) -> None:
        self._buckets = {}
        for step, value in points.items():
            self._buckets.setdefault(step // self.width, {})[step] = value
        for number, bucket in self._buckets.items():
            self._buckets[number] = _thin(bucket)


def _thin(bucket: Mapping[int, float]) -> dict[int, float]:
    """Return the points of a bucket that stay."""
    kept = {max(bucket)}
    numbers = [step for step, value in bucket.items() if not math.isnan(value)]
    if numbers:
        kept.add(min(numbers, key=bucket.__getitem__))
        kept.add(max(numbers, key=bucket.__getitem__))
    if len(numbers) < len(bucket):
        kept.add(min(step for step, value in bucket.items() if math.isnan(value)))
    return {step: bucket[step] for step in sorted(kept)}
