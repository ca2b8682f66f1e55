"""The results of a whole sweep, whose sweeper may launch its jobs in several batches."""

from collections.abc import Iterator
from contextlib import contextmanager

from equipoise.app.sweeps.results import SweepResults
from equipoise.app.sweeps.tables import print_closing_table

__all__ = ["collected_results", "current_results"]

# Results that a program collects over several launches of a sweeper.
_collecting: list[SweepResults] = []


@contextmanager
def collected_results() -> Iterator[SweepResults]:
    """Collect the results of all jobs of a block; at its end, show them in one table and raise failures.

    Raises:
        SweepError: If jobs have failed, and no sweeper knows of it.
    """
    results = SweepResults()
    _collecting.append(results)
    try:
        yield results
    finally:
        _collecting.remove(results)
        if results.jobs:
            print_closing_table(results)
    results.raise_failures()


def current_results() -> SweepResults | None:
    """Return the results that the program collects; None if it does not, as a `hydra.main` of the user's own."""
    if not _collecting:
        return None
    return _collecting[-1]
