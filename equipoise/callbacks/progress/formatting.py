"""Texts for numbers, times and rates."""

import math
from typing import Any

__all__ = ["format_rate", "format_time", "format_value", "printable"]


def format_value(value: Any) -> str:
    """Format a number with four significant digits, in a width as constant as possible; other values as text.

    Example:
        >>> [format_value(value) for value in (0.5, 12, 1234.5, 1.5e-7)]
        ['0.5000', '12', '1234', '1.500e-07']
    """
    if not isinstance(value, float):
        return printable(str(value))
    if not math.isfinite(value) or value == 0:
        return f"{value:.1f}"
    if 1e-4 <= abs(value) < 1e5:
        return f"{value:#.4g}".rstrip(".")
    return f"{value:.3e}"


def format_time(seconds: float) -> str:
    """Format hours, minutes and seconds; the hours only from one hour on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minute:02}:{second:02}"
    return f"{minute}:{second:02}"


def format_rate(rate: float) -> str:
    """Format batches per second, or seconds per batch if that is more than one, in a constant width."""
    value = rate
    unit = "it/s"
    if rate < 1:
        value = 1 / rate
        unit = "s/it"
    # Rounding must not add a digit: 9.996 becomes 10.0.
    if value >= 99.95:
        return f"{value:4.0f} {unit}"
    if value >= 9.995:
        return f"{value:4.1f} {unit}"
    return f"{value:4.2f} {unit}"


def printable(text: str) -> str:
    """Replace line breaks and control characters in a text by blanks."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " for char in text)
