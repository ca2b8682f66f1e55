"""Of a test with many cases a few are quick, evenly spread, and more are not slow."""

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


@pytest.mark.quick_cases(4)
@pytest.mark.few_cases(2)
@pytest.mark.parametrize("number", range(8))
def test_further_cases_that_are_not_slow_are_thorough(number: int, request: pytest.FixtureRequest) -> None:
    marks = {name for name in ("slow", "thorough") if request.node.get_closest_marker(name) is not None}
    assert marks == [set(), {"slow"}, {"thorough"}, {"slow"}][number % 4]
