"""A curve over steps with a bounded number of points; it becomes coarser as it grows."""

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["StepCurve"]

_MOST_BUCKETS = 256
# A bucket with more points than this is thinned.
_FEW_POINTS = 2


class StepCurve:
    """Values by steps, thinned if there are many.

    Buckets of equal width divide the steps. At most four points of a bucket stay: the least value, the greatest, the
    last, and the first that is not a number. The width begins at 1 step, and doubles whenever there are more than 256
    buckets, so a curve of any run has at most 1024 points.

    Attributes:
        width: Number of steps of a bucket.

    Example:
        >>> curve = StepCurve()
        >>> for step in range(100_000):
        ...     curve.add(step, 1.0 if step == 617 else 0.0)
        >>> len(curve.points()) <= 1024, curve.points()[617]
        (True, 1.0)
    """

    def __init__(self) -> None:
        self.width = 1
        # For the number of each bucket its values by step.
        self._buckets: dict[int, dict[int, float]] = {}

    def add(self, step: int, value: float) -> None:
        """Add a value.

        Args:
            step: Its step. It replaces an earlier value of this step.
            value: The value; it may be infinite or no number.
        """
        number = step // self.width
        bucket = self._buckets.setdefault(number, {})
        bucket[step] = value
        if len(bucket) > _FEW_POINTS:
            self._buckets[number] = _thin(bucket)
        # One step may lie many buckets further on.
        while len(self._buckets) > _MOST_BUCKETS:
            self._widen()

    def points(self) -> dict[int, float]:
        """Return the values by step, in the order of steps."""
        points: dict[int, float] = {}
        for bucket in self._buckets.values():
            points.update(bucket)
        return dict(sorted(points.items()))

    def drop_from(self, step: int) -> None:
        """Forget the values of a step and later ones.

        Args:
            step: The first step to forget.
        """
        earlier = {}
        for earlier_step, value in self.points().items():
            if earlier_step < step:
                earlier[earlier_step] = value
        self._fill(earlier)

    def state_dict(self) -> dict[str, Any]:
        """Return the width of buckets and the points."""
        points = self.points()
        return {"width": self.width, "steps": list(points), "values": list(points.values())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the points of an earlier process."""
        self.width = int(state_dict["width"])
        pairs = zip(
            state_dict["steps"],
            state_dict["values"],
            strict=True,
        )
        self._fill(dict(pairs))

    def _widen(self) -> None:
        self.width *= 2
        self._fill(self.points())

    def _fill(self, points: Mapping[int, float]) -> None:
        self._buckets = {}
        for step, value in points.items():
            number = step // self.width
            bucket = self._buckets.setdefault(number, {})
            bucket[step] = value
        for number, bucket in self._buckets.items():
            self._buckets[number] = _thin(bucket)


def _thin(bucket: Mapping[int, float]) -> dict[int, float]:
    """Return the points of a bucket that stay."""
    numbers = []
    not_numbers = []
    for step, value in bucket.items():
        if math.isnan(value):
            not_numbers.append(step)
        else:
            numbers.append(step)
    last_step = max(bucket)
    steps = {last_step}
    if numbers:
        steps.add(min(numbers, key=bucket.__getitem__))
        steps.add(max(numbers, key=bucket.__getitem__))
    if not_numbers:
        steps.add(min(not_numbers))
    return {step: bucket[step] for step in sorted(steps)}
