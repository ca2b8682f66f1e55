"""Tests with many cases: `make test` runs a few cases of such a test, `.ci/run` runs all."""

from collections.abc import Sequence

import pytest

__all__ = ["cases_of_tests", "mark_further_cases", "name_of_test", "spread"]


def mark_further_cases(items: Sequence[pytest.Item]) -> None:
    """Mark the cases of tests with `@pytest.mark.quick_cases(count)` as slow, except as many, evenly spread.

    Args:
        items: All collected cases, in their order.
    """
    marked = [item for item in items if item.get_closest_marker("quick_cases") is not None]
    for cases in cases_of_tests(marked).values():
        marker = cases[0].get_closest_marker("quick_cases")
        assert marker is not None
        quick = spread(len(cases), *marker.args)
        for index, case in enumerate(cases):
            if index not in quick:
                case.add_marker(pytest.mark.slow)


def name_of_test(item: pytest.Item) -> str:
    """Return the name of a test without the parameters of a case."""
    return item.nodeid.partition("[")[0]


def cases_of_tests(items: Sequence[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Return the cases of each test, by the test's name."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(name_of_test(item), []).append(item)
    return cases


def spread(size: int, count: int) -> set[int]:
    """Return as many indices of a sequence, evenly spread over it; all of them if it is shorter.

    Example:
        >>> sorted(spread(10, 4))
        [0, 2, 5, 7]
    """
    if size <= count:
        return set(range(size))
    return {index * size // count for index in range(count)}
