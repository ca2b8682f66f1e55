"""Numbers, sizes and times for people."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.formats import (
    format_bytes,
    format_clock,
    format_count,
    format_number,
    format_quantity,
    format_rate,
    format_span,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.31239, "0.3124"), (12.0, "12.00"), (1234.5, "1234"), (99999.0, "1.000e+05"), (1.5e-7, "1.500e-07"),
        (-0.5, "-0.5000"), (0.0, "0.0"), (math.nan, "nan"), (-math.inf, "-inf"), (7, "7"), ("v\t1", "v 1"),
    ],
)  # fmt: skip
def test_values_have_four_digits(value: object, text: str):
    assert format_number(value) == text


def test_clock_and_rates():
    assert [format_clock(seconds) for seconds in (0.4, 59.6, 3599, 3600, 360000)] == [
        "0:00",
        "1:00",
        "59:59",
        "1:00:00",
        "100:00:00",
    ]
    assert [format_rate(rate) for rate in (12345.0, 99.96, 38.24, 9.996, 1.0, 0.5, 0.01)] == [
        "12345 it/s", " 100 it/s", "38.2 it/s", "10.0 it/s", "1.00 it/s", "2.00 s/it", " 100 s/it",
    ]  # fmt: skip


def test_counts():
    assert [format_count(value) for value in (0.0, -0.5, 999.94, 1000.4, 123456, 2.5e9, 1e20, math.inf)] == [
        "0",
        "-0.5",
        "999.9",
        "1,000",
        "123,456",
        "2.5 G",
        "1e+20",
        "inf",
    ]


def test_spans():
    assert [format_span(value) for value in (0.001, 59.94, 59.96, 3600, 86399, 86400, -5)] == [
        "0.001 s",
        "59.9 s",
        "1 min",
        "1 h",
        "23 h 59 min",
        "1 d",
        "-5 s",
    ]


def test_quantities():
    assert [format_quantity(1536.0, unit) for unit in ("number", "bytes", "seconds")] == [
        "1,536",
        "1.5 KiB",
        "25 min 36 s",
    ]
    assert format_quantity(math.nan, "bytes") == "nan"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 2**20, "1.5 GiB"),
        (1024**2 - 1, "1.0 MiB"),
        (1023.94 * 1024, "1023.9 KiB"),
        (3 * 2**40, "3.0 TiB"),
        (2**60, "1024.0 PiB"),
        (-1536, "-1.5 KiB"),
        (-1, "-1 B"),
        (141.1 * GIB, "141.1 GiB"),
    ],
)
def test_bytes_for_people(count: float, text: str) -> None:
    assert format_bytes(count) == text


@settings(deadline=None)
@given(count=st.integers(-(2**60) + 2**50, 2**60 - 2**50))
def test_what_is_written_is_the_number(count: int) -> None:
    """Never more than 1023.9 of a unit, and off by no more than half of the last digit."""
    number, unit = format_bytes(count).split()
    power = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB", "PiB"].index(unit)
    assert re.fullmatch(r"-?\d+" if unit == "B" else r"-?\d+\.\d", number)
    assert abs(float(number)) < 1024
    assert abs(float(number) * power - count) <= 0.05 * power * (1 + 1e-9) + 0.04 * (abs(count) >= 1024**5)
