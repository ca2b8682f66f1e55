"""The largest batch that runs, by trials."""

from collections.abc import Callable

__all__ = ["largest_that_runs"]

# The search ends when the answer is known to this part of it.
_PRECISION = 16


def largest_that_runs(
    runs: Callable[[int], bool], running: int, failed: int | None, bound: int, multiple: int = 1
) -> tuple[int | None, bool]:
    """Return the largest batch size that runs, and whether it is the bound.

    Sizes are doubled until one does not run; then the answer lies between two sizes, and the middle is tried until they
    differ by at most a sixteenth.

    Args:
        runs: Function that tries a size.
        running: A size that runs; 0 if there is none yet.
        failed: A size that does not run; None if there is none yet.
        bound: The largest size to try.
        multiple: Sizes are multiples of this number. Default: 1.

    Returns:
        The size, None if none runs; and True if no larger one was tried.

    Example:
        >>> largest_that_runs(lambda size: size <= 100, 32, None, 1000)
        (100, False)
        >>> largest_that_runs(lambda size: True, 32, None, 100)
        (100, True)
    """
    bound -= bound % multiple
    # 1. Double.
    while failed is None:
        if running >= bound:
            return running or None, True
        size = min(max(2 * running, multiple), bound)
        if runs(size):
            running = size
        else:
            failed = size

    # 2. Halve the distance.
    while failed - running > max(multiple, running // _PRECISION):
        size = (running + failed) // 2
        size -= size % multiple
        if size <= running:
            break
        if runs(size):
            running = size
        else:
            failed = size
    return running or None, False
