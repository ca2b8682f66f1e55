"""Results of batches that processes have computed in turn, in the order of the batches."""

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any, TypeVar

__all__ = ["interleave"]

T = TypeVar("T")

# Stands for the last result of a process that had one batch less.
_MISSING: Any = object()


def interleave(of_processes: Iterable[Iterable[T]]) -> list[T]:
    """Return the results of all processes in the order of the batches.

    Args:
        of_processes: The results of each process, in the order of ranks.

    Example:
        >>> interleave([["a", "c", "e"], ["b", "d"]])
        ['a', 'b', 'c', 'd', 'e']
    """
    rounds: Iterator[tuple[Any, ...]] = zip_longest(*of_processes, fillvalue=_MISSING)
    return [result for results_of_round in rounds for result in results_of_round if result is not _MISSING]
