"""Tests with many cases: `make test` runs a few cases of such a test, other versions more, `.ci/run` runs all."""

from collections.abc import Sequence

import pytest

__all__ = ["cases_of_tests", "mark_further_cases", "name_of_test", "spread"]


def mark_further_cases(items: Sequence[pytest.Item]) -> None:
    """Mark the cases of tests with `@pytest.mark.quick_cases(count)` as slow, except as many, evenly spread.

    Of those that are not slow, `@pytest.mark.few_cases(count)` marks all as thorough, except as many.

    Args:
        items: All collected cases, in their order.
    """
    _mark(items, "quick_cases", pytest.mark.slow)
    _mark([item for item in items if item.get_closest_marker("slow") is None], "few_cases", pytest.mark.thorough)


def _mark(items: Sequence[pytest.Item], name: str, further: pytest.MarkDecorator) -> None:
    marked = [item for item in items if item.get_closest_marker(name) is not None]
    for cases in cases_of_tests(marked).values():
        marker = cases[0].get_closest_marker(name)
        assert marker is not None
        chosen = spread(len(cases), *marker.args)
        for index, case in enumerate(cases):
            if index not in chosen:
                case.add_marker(further)


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
