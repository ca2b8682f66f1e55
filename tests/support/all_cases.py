"""Combinations of cases: a part of them in every run of the tests, all of them with EQUIPOISE_TEST_ALL=1."""

import os
from collections.abc import Sequence
from typing import TypeVar

__all__ = ["dealt"]

T = TypeVar("T")


def dealt(cases: Sequence[T], number: int, count: int) -> list[T]:
    """Return every so many of the cases; all of them with EQUIPOISE_TEST_ALL=1.

    Args:
        cases: The cases.
        number: The number of this part, from 0.
        count: The number of parts.

    Example:
        >>> dealt("abcdef", 1, 3)
        ['b', 'e']
    """
    if os.environ.get("EQUIPOISE_TEST_ALL") == "1":
        return list(cases)
    return list(cases[number::count])
