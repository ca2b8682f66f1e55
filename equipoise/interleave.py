"""Results of batches that were dealt out in turn, put back into the order of the batches."""

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any, TypeVar

__all__ = ["interleave"]

T = TypeVar("T")
_MISSING: Any = object()  # where a process had one batch less


def interleave(of_processes: Iterable[Iterable[T]]) -> list[T]:
    """Return the results of all processes in the order of the batches.

    Args:
        of_processes: The results of each process, in the order of ranks.

    Example:
        >>> interleave([["a", "c", "e"], ["b", "d"]])
        ['a', 'b', 'c', 'd', 'e']
    """
    rounds: Iterator[tuple[Any, ...]] = zip_longest(*of_processes, fillvalue=_MISSING)
    return [result for turn in rounds for result in turn if result is not _MISSING]
