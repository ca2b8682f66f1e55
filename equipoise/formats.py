"""Numbers, sizes and times as text for people."""

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "Unit",
    "align_columns",
    "counted",
    "format_bytes",
    "format_clock",
    "format_count",
    "format_duration",
    "format_number",
    "format_path",
    "format_quantity",
    "format_rate",
    "format_span",
    "printable",
]

Unit = Literal["number", "bytes", "seconds", "step"]

_MINUTE = 60
_HOUR = 3600
_DAY = 86400
_SI_PREFIXES = (
    (1e12, " T"),
    (1e9, " G"),
    (1e6, " M"),
)
_TIME_UNITS = (
    (_DAY, "d"),
    (_HOUR, "h"),
    (_MINUTE, "min"),
    (1, "s"),
)
# From here on, seconds with three significant digits would read as 60 seconds.
_ALMOST_A_MINUTE = 59.95


# Numbers


def format_number(value: Any) -> str:
    """Format a number with four significant digits, in a width as constant as possible; other values as text.

    Example:
        >>> [format_number(value) for value in (0.5, 12, 1234.5, 1.5e-7)]
        ['0.5000', '12', '1234', '1.500e-07']
    """
    if not isinstance(value, float):
        return printable(str(value))
    if not math.isfinite(value) or value == 0:
        return f"{value:.1f}"
    if 1e-4 <= abs(value) < 1e5:
        return f"{value:#.4g}".rstrip(".")
    return f"{value:.3e}"


def format_count(value: float) -> str:
    """Format a number with at most four significant digits, separated thousands, and names for millions and more.

    Example:
        >>> [format_count(value) for value in (0.98764, 12, 12345, 1.5e-7, 2_345_678, float("nan"))]
        ['0.9876', '12', '12,345', '1.5e-07', '2.346 M', 'nan']
    """
    if not math.isfinite(value):
        return f"{value:.1f}"
    magnitude = abs(value)
    for size, prefix in _SI_PREFIXES:
        # Beyond the last prefix, exponents read better.
        if size <= magnitude < 1e15:
            return f"{value / size:.4g}{prefix}"
    # From here on four significant digits are whole numbers.
    if 999.95 <= magnitude < 1e6:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a number of things, such as "1 key" and "2 keys".

    Example:
        >>> counted(1, "batch", "batches"), counted(2, "batch", "batches")
        ('1 batch', '2 batches')
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def format_bytes(count: float) -> str:
    """Format a number of bytes with binary units.

    Args:
        count: The number of bytes.

    Example:
        >>> format_bytes(1536 * 2**20), format_bytes(12)
        ('1.5 GiB', '12 B')
    """
    if abs(count) < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        # From 1023.95 on, one decimal would round to 1024.0.
        if abs(count) < 1023.95:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} PiB"


def format_quantity(value: float, unit: Unit) -> str:
    """Format a number with its unit, as short as possible.

    Example:
        >>> format_quantity(3 * 2**30, "bytes"), format_quantity(90, "seconds"), format_quantity(1e4, "step")
        ('3 GiB', '1 min 30 s', '10,000')
    """
    if unit == "seconds":
        return format_span(value)
    if unit != "bytes":
        return format_count(value)
    if not math.isfinite(value):
        return f"{value}"
    return format_bytes(value).replace(".0 ", " ")


# Times and rates


def format_clock(seconds: float) -> str:
    """Format hours, minutes and seconds; the hours only from one hour on.

    Example:
        >>> [format_clock(seconds) for seconds in (0.4, 90, 3720)]
        ['0:00', '1:30', '1:02:00']
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minute:02}:{second:02}"
    return f"{minute}:{second:02}"


def format_duration(seconds: float) -> str:
    """Format a time below a minute with three digits, and a longer one as a clock shows it.

    Example:
        >>> [format_duration(seconds) for seconds in (0.25, 12.34, 90)]
        ['250 ms', '12.3 s', '1:30']
    """
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < _ALMOST_A_MINUTE:
        return f"{seconds:.3g} s"
    return format_clock(seconds)


def format_span(seconds: float) -> str:
    """Format a time in its two largest units.

    Example:
        >>> [format_span(seconds) for seconds in (0, 0.25, 12.34, 90, 3720, 200_000)]
        ['0 s', '0.25 s', '12.3 s', '1 min 30 s', '1 h 2 min', '2 d 7 h']
    """
    is_short = abs(seconds) < _ALMOST_A_MINUTE
    if is_short or not math.isfinite(seconds):
        return f"{seconds:.3g} s"
    # Zeros in front are left out, and so is a zero in second place.
    remaining = round(seconds)
    counts: list[tuple[int, str]] = []
    for size, unit in _TIME_UNITS:
        count, remaining = divmod(remaining, size)
        if count or counts:
            counts.append((count, unit))
    return " ".join(f"{count} {unit}" for count, unit in counts[:2] if count)


def format_rate(rate: float) -> str:
    """Format batches per second, or seconds per batch if that is more than one, in a constant width.

    Example:
        >>> format_rate(38.24), format_rate(0.5)
        ('38.2 it/s', '2.00 s/it')
    """
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


# Text


def printable(text: str) -> str:
    """Replace line breaks and control characters in a text by blanks."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " for char in text)


def format_path(path: str) -> str:
    """Return a path relative to the working directory, if it lies below it."""
    with contextlib.suppress(ValueError):
        return str(Path(path).relative_to(Path.cwd()))
    return path


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines, with columns of equal width.

    Args:
        rows: The cells of each row.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
