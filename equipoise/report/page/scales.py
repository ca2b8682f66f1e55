"""Axis marks, numbers for people, and thinned time lines."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from equipoise.memory.devices import format_bytes

__all__ = ["Point", "Scale", "Unit", "format_count", "format_span", "format_value", "make_scale", "thin"]

Point = tuple[float, float]
Unit = Literal["number", "bytes", "seconds", "step"]

_LARGEST = 1e300  # what is beyond has no room on an axis: differences must stay finite
_TIME_STEPS = (1, 2, 5, 10, 15, 30, *(60 * m for m in (1, 2, 5, 10, 15, 30)), *(3600 * h for h in (1, 2, 3, 6, 12)))


def format_count(value: float) -> str:
    """A number with at most four significant digits; thousands are set apart, millions and more are named.

    Example:
        >>> [format_count(value) for value in (0.98764, 12, 12345, 1.5e-7, 2_345_678, float("nan"))]
        ['0.9876', '12', '12,345', '1.5e-07', '2.346 M', 'nan']
    """
    if not math.isfinite(value):
        return f"{value:.1f}"
    for limit, name in ((1e12, " T"), (1e9, " G"), (1e6, " M")):
        if limit <= abs(value) < 1e15:
            return f"{value / limit:.4g}{name}"
    if 999.95 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def format_span(seconds: float) -> str:
    """A time in its two largest units.

    Example:
        >>> [format_span(seconds) for seconds in (0, 0.25, 12.34, 90, 3720, 200_000)]
        ['0 s', '0.25 s', '12.3 s', '1 min 30 s', '1 h 2 min', '2 d 7 h']
    """
    if not math.isfinite(seconds) or abs(seconds) < 59.95:
        return f"{seconds:.3g} s"
    left = round(seconds)
    parts: list[tuple[int, str]] = []
    for size, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, left = divmod(left, size)
        if count or parts:
            parts.append((count, name))
    return " ".join(f"{count} {name}" for count, name in parts[:2] if count)


def format_value(value: float, unit: Unit) -> str:
    """A number with its unit, as short as it can be.

    Example:
        >>> format_value(3 * 2**30, "bytes"), format_value(90, "seconds"), format_value(1e4, "step")
        ('3 GiB', '1 min 30 s', '10,000')
    """
    if unit == "bytes":
        return format_bytes(value).replace(".0 ", " ") if math.isfinite(value) else f"{value}"
    return format_span(value) if unit == "seconds" else format_count(value)


@dataclass(frozen=True)
class Scale:
    """One axis.

    Attributes:
        low: Where it begins; `high`: where it ends.
        ticks: What is marked.
        unit: What it counts.
        log: Whether equal distances are equal ratios.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    unit: Unit
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
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
    """Chooses an axis for some values.

    Args:
        values: What must have room on it; at least one that is finite.
        unit: What is counted.
        from_zero: Whether it begins at zero, whatever the values. Default: False.
        tight: Whether it ends where the values do. Default: False, with a little air.
        log: Whether it may be logarithmic, where the values ask for it. Default: False.
        most: About how many marks it gets. Default: 5.
    """
    finite = [min(max(float(value), -_LARGEST), _LARGEST) for value in values if math.isfinite(value)]
    low, high = min(finite), max(finite)
    if log and low > 0 and high > 100 * low:
        return _log_scale(low, high)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # one value, or as good as one
        margin = {"step": 0.5, "seconds": 0.5}.get(unit, max(abs(high) * 0.1, 1e-12))
        low, high = (0.0, high or 1.0) if from_zero else (low - margin, high + margin)
    step = _step((high - low) / most, unit)
    if not tight:  # a little air; the outermost marks may lie within
        air = 0.04 * (high - low)
        low, high = low - (0.0 if from_zero and low == 0 else air), high + (0.0 if from_zero and high == 0 else air)
    near = 1e-9 * (high - low)
    first, last = math.ceil((low - near) / step), math.floor((high + near) / step)
    return Scale(low, high, tuple(index * step for index in range(first, last + 1)), unit)


def _log_scale(low: float, high: float) -> Scale:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = math.ceil((last - first) / 6)
    ticks = tuple(10.0**power for power in range(first, last + 1, every) if low <= 10.0**power <= high)
    return Scale(low, high, ticks, "number", log=True)


def _step(span: float, unit: Unit) -> float:
    """The least round number that is not below a span."""
    if unit == "seconds" and 1 <= span <= _TIME_STEPS[-1]:
        return next(float(step) for step in _TIME_STEPS if step >= span)
    if unit == "bytes":
        unit_size = 1024.0 ** max(0, math.floor(math.log(max(span, 1), 1024)))
        return next(
            unit_size * step
            for step in (1, 2, 4, 5, 8, 10, 20, 50, 100, 200, 256, 512, 1024)
            if unit_size * step >= span
        )
    size = 10.0 ** math.floor(math.log10(span))
    step = next(size * step for step in (1, 2, 5, 10) if size * step >= span * (1 - 1e-9))
    return max(step, 1.0) if unit == "step" else step


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """Takes points out of a long line, so that it looks as it did.

    The least and the greatest value of each stretch stay, so does the first that is no number, and so do both ends.

    Args:
        points: Ordered by x.
        most: How many may stay; at least 5.

    Example:
        >>> line = [(float(x), float(x == 617)) for x in range(1000)]
        >>> kept = thin(line, 50)
        >>> len(kept) <= 50, (617.0, 1.0) in kept
        (True, True)
    """
    if len(points) <= most:
        return list(points)
    inner, stretches = len(points) - 2, (most - 2) // 3
    kept = {0, len(points) - 1}
    for number in range(stretches):
        stretch = range(1 + number * inner // stretches, 1 + (number + 1) * inner // stretches)
        finite = [index for index in stretch if math.isfinite(points[index][1])]
        value: Callable[[int], float] = lambda index: points[index][1]  # noqa: E731
        if finite:
            kept |= {min(finite, key=value), max(finite, key=value)}
        if len(finite) < len(stretch):
            kept.add(next(index for index in stretch if not math.isfinite(points[index][1])))
    return [points[index] for index in sorted(kept)]
