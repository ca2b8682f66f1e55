"""Numbers, sizes and times for people."""

import math
from collections.abc import Callable

import pytest

from equipoise.formats import (
    format_bytes,
    format_clock,
    format_count,
    format_number,
    format_quantity,
    format_rate,
    format_span,
)

TEXTS: dict[Callable[..., str], dict[object, str]] = {
    format_number: {
        0.31239: "0.3124", 12.0: "12.00", 1234.5: "1234", 99999.0: "1.000e+05", 1.5e-7: "1.500e-07", -0.5: "-0.5000",
        0.0: "0.0", math.nan: "nan", -math.inf: "-inf", 7: "7", "v\t1": "v 1",
    },
    format_clock: {0.4: "0:00", 59.6: "1:00", 3599: "59:59", 3600: "1:00:00", 360000: "100:00:00"},
    format_rate: {
        12345.0: "12345 it/s", 99.96: " 100 it/s", 38.24: "38.2 it/s", 9.996: "10.0 it/s", 1.0: "1.00 it/s",
        0.5: "2.00 s/it", 0.01: " 100 s/it",
    },
    format_count: {
        0.0: "0", -0.5: "-0.5", 999.94: "999.9", 1000.4: "1,000", 123456: "123,456", 2.5e9: "2.5 G", 1e20: "1e+20",
        math.inf: "inf",
    },
    format_span: {
        0.001: "0.001 s", 59.94: "59.9 s", 59.96: "1 min", 3600: "1 h", 86399: "23 h 59 min", 86400: "1 d", -5: "-5 s",
    },
    format_bytes: {
        0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536 * 2**20: "1.5 GiB", 1024**2 - 1: "1.0 MiB",
        1023.94 * 1024: "1023.9 KiB", 3 * 2**40: "3.0 TiB", 2**60: "1024.0 PiB", -1536: "-1.5 KiB", -1: "-1 B",
        141.1 * 2**30: "141.1 GiB",
    },
}  # fmt: skip


@pytest.mark.parametrize("function", TEXTS, ids=lambda function: function.__name__)
def test_numbers_as_people_write_them(function: Callable[..., str]) -> None:
    assert {value: function(value) for value in TEXTS[function]} == TEXTS[function]


def test_quantities_are_written_by_their_unit() -> None:
    assert format_quantity(1536.0, "number") == "1,536"
    assert format_quantity(1536.0, "bytes") == "1.5 KiB"
    assert format_quantity(1536.0, "seconds") == "25 min 36 s"
    assert format_quantity(math.nan, "bytes") == "nan"
