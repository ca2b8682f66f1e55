"""Of a test with many cases a few are quick, evenly spread."""

import pytest

from tests.support.quick_cases import spread


@pytest.mark.parametrize(
    ("size", "count", "expected"),
    [(10, 4, [0, 2, 5, 7]), (4, 2, [0, 2]), (3, 3, [0, 1, 2]), (2, 5, [0, 1]), (7, 1, [0])],
)
def test_spread(size: int, count: int, expected: list[int]) -> None:
    assert sorted(spread(size, count)) == expected


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("number", range(4))
def test_further_cases_are_slow(number: int, request: pytest.FixtureRequest) -> None:
    is_slow = request.node.get_closest_marker("slow") is not None
    assert is_slow == (number % 2 == 1)
