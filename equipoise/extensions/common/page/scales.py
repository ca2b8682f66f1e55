"""Axis marks, and thinned time lines."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from equipoise.formats import Unit

__all__ = ["Point", "Scale", "make_scale", "thin"]

Point = tuple[float, float]

# Larger values are cut to this one: the difference of two values must stay finite.
# A range below is none: its parts would be zero.
_LEAST = 1e-300
_LARGEST = 1e300
# Relative difference below which two values count as one.
_SAME = 1e-9
# Share of the range that stays free at each end of an axis.
_AIR = 0.04
_MINUTE = 60
_HOUR = 3600
# Distances between ticks: seconds, multiples of 1024 to a power, and of 10 to a power.
_TIME_STEPS = (
    1,
    2,
    5,
    10,
    15,
    30,
    _MINUTE,
    2 * _MINUTE,
    5 * _MINUTE,
    10 * _MINUTE,
    15 * _MINUTE,
    30 * _MINUTE,
    _HOUR,
    2 * _HOUR,
    3 * _HOUR,
    6 * _HOUR,
    12 * _HOUR,
)
_BYTE_STEPS = (1, 2, 4, 5, 8, 10, 20, 50, 100, 200, 256, 512, 1024)
_DECIMAL_STEPS = (1, 2, 5, 10)


@dataclass(frozen=True)
class Scale:
    """Scale of one axis.

    Attributes:
        low: Value at its start.
        high: Value at its end.
        ticks: Values to mark.
        unit: Unit of its values.
        log: True for a logarithmic scale. Default: False.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    unit: Unit
    log: bool = False

    def place(self, value: float) -> float:
        """Return the position of a value, from 0 to 1."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def make_scale(
    values: Sequence[float],
    unit: Unit,
    *,
    from_zero: bool = False,
    tight: bool = False,
    log: bool = False,
    most: int = 5,
) -> Scale:
    """Choose a scale for some values.

    Args:
        values: Values that the scale must cover; at least one is finite.
        unit: Unit of the values.
        from_zero: Include zero. Default: False.
        tight: End at the outermost values. Default: False, with a little air.
        log: Allow a logarithmic scale, used if all values are positive and their range exceeds a factor of 100.
            Default: False.
        most: Approximate number of ticks. Default: 5.
    """
    # 1. Take the limits of the values.
    low, high = _limits(values)
    if log and low > 0 and high > 100 * low:
        return _log_scale(low, high)
    # 2. Widen them where they do not span a range.
    if from_zero:
        low = min(low, 0.0)
        high = max(high, 0.0)
    magnitude = max(abs(low), abs(high))
    if high - low <= max(_SAME * magnitude, _LEAST):
        low, high = _widen(low, high, unit, from_zero=from_zero)
    # 3. The step follows from the values alone; the outermost ticks may lie in the air.
    step = _step((high - low) / most, unit)
    if not tight:
        low, high = _add_air(low, high, from_zero=from_zero)
    return Scale(low, high, _ticks(low, high, step), unit)


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Return the least and the greatest finite value."""
    finite = []
    for value in values:
        if math.isfinite(value):
            finite.append(min(max(float(value), -_LARGEST), _LARGEST))
    return min(finite), max(finite)


def _widen(low: float, high: float, unit: Unit, *, from_zero: bool) -> tuple[float, float]:
    """Return limits around a single value."""
    if from_zero:
        if high <= _LEAST:
            high = 1.0
        return 0.0, high
    if unit in ("step", "seconds"):
        # Half a step is nothing beside very large ones.
        margin = max(0.5, abs(high) * 1e-6)
    else:
        margin = max(abs(high) * 0.1, 1e-12)
    return low - margin, high + margin


def _add_air(low: float, high: float, *, from_zero: bool) -> tuple[float, float]:
    """Return wider limits; an axis that begins or ends at zero stays there."""
    air = _AIR * (high - low)
    if not (from_zero and low == 0):
        low -= air
    if not (from_zero and high == 0):
        high += air
    return low, high


def _ticks(low: float, high: float, step: float) -> tuple[float, ...]:
    # Rounding must not lose a tick at a limit.
    tolerance = _SAME * (high - low)
    first = math.ceil((low - tolerance) / step)
    last = math.floor((high + tolerance) / step)
    return tuple(index * step for index in range(first, last + 1))


def _log_scale(low: float, high: float) -> Scale:
    first = math.floor(math.log10(low))
    last = math.ceil(math.log10(high))
    stride = math.ceil((last - first) / 6)
    powers = [10.0**exponent for exponent in range(first, last + 1, stride)]
    return Scale(
        low,
        high,
        tuple(power for power in powers if low <= power <= high),
        "number",
        log=True,
    )


def _step(span: float, unit: Unit) -> float:
    """Return the least round number that is not below a span."""
    longest = _TIME_STEPS[-1]
    if unit == "seconds" and 1 <= span <= longest:
        return _first_from(span, _TIME_STEPS, 1.0)
    if unit == "bytes":
        exponent = math.floor(math.log(max(span, 1), 1024))
        return _first_from(span, _BYTE_STEPS, 1024.0**exponent)
    exponent = math.floor(math.log10(span))
    # Rounding of the logarithm must not skip a step.
    tolerant_span = span * (1 - _SAME)
    step = _first_from(tolerant_span, _DECIMAL_STEPS, 10.0**exponent)
    if unit == "step":
        # There is nothing between two steps of training.
        return max(step, 1.0)
    return step


def _first_from(span: float, steps: Sequence[int], size: float) -> float:
    """Return the first step, in units of `size`, that is not below a span."""
    return next(size * step for step in steps if size * step >= span)


def thin(points: Sequence[Point], most: int, across: Callable[[float], float] = float) -> list[Point]:
    """Take points out of a long line without a visible change.

    Of each stretch across stay the least and the greatest value and the first that is no finite number. Both ends stay.

    Args:
        points: Points ordered by x.
        most: Maximum number of points in the result; at least 5.
        across: Returns the place of an x across the chart, in any unit. Default: `float`, that of a linear axis.

    Example:
        >>> line = [(float(x), float(x == 617)) for x in range(1000)]
        >>> thinned = thin(line, 50)
        >>> len(thinned) <= 50, (617.0, 1.0) in thinned
        (True, True)
    """
    if len(points) <= most:
        return list(points)
    first = across(points[0][0])
    length = across(points[-1][0]) - first
    # Three points of each stretch stay, and both ends.
    stretches = (most - 2) // 3
    by_stretch: dict[int, list[int]] = defaultdict(list)
    for index, (x, _) in enumerate(points):
        number = 0
        if length:
            number = int(stretches * (across(x) - first) / length)
        by_stretch[min(number, stretches - 1)].append(index)
    indices = {0, len(points) - 1}
    for stretch in by_stretch.values():
        indices |= _landmarks(points, stretch)
    return [points[index] for index in sorted(indices)]


def _landmarks(points: Sequence[Point], stretch: Sequence[int]) -> set[int]:
    """Return the indices of the least, the greatest and the first value that is no finite number."""

    def value(index: int) -> float:
        return points[index][1]

    finite = []
    not_finite = []
    for index in stretch:
        if math.isfinite(value(index)):
            finite.append(index)
        else:
            not_finite.append(index)
    landmarks = set(not_finite[:1])
    if finite:
        landmarks.add(min(finite, key=value))
        landmarks.add(max(finite, key=value))
    return landmarks
