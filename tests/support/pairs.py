"""Fewer cases than all combinations of some values: every two values still meet."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

__all__ = ["pairwise"]


def pairwise(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations of which at least one has each pair of values of two different lists.

    The next one is always the combination with most pairs that are new, and the first of several.

    Args:
        values: A list for each parameter, at least two.

    Example:
        >>> pairwise([1, 2], ["a", "b"], [False, True])
        [(1, 'a', False), (1, 'b', True), (2, 'a', True), (2, 'b', False)]
    """
    candidates = {indices: _pairs(indices) for indices in product(*(range(len(each)) for each in values))}
    missing = set().union(*candidates.values())
    chosen = []
    while missing:
        best = max(candidates, key=lambda indices: len(candidates[indices] & missing))
        missing -= candidates.pop(best)
        chosen.append(tuple(each[index] for each, index in zip(values, best, strict=True)))
    return chosen


def _pairs(indices: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    """Each two parameters, with the number of their value."""
    return set(combinations(enumerate(indices), 2))
