"""The largest batch size that fits."""

from collections.abc import Callable

__all__ = ["largest_size"]

# The largest answer, for steps whose memory hardly grows with the batch.
_MOST_SAMPLES = 2**24


def largest_size(fits: Callable[[int], bool], start: int) -> int:
    """Return the largest batch size that fits, at most 16.8 million; 0 if none does.

    Args:
        fits: Returns True for a batch size that fits. Every smaller one fits, too.
        start: The size to begin with, from 1.

    Example:
        >>> largest_size(lambda size: size * 3 <= 100, 8)
        33
    """
    largest = 0
    too_large = _MOST_SAMPLES + 1
    while too_large - largest > 1:
        # Double from the start on, then halve the interval.
        halved = (largest + too_large) // 2
        doubled = max(2 * largest, start)
        middle = min(halved, doubled)
        if fits(middle):
            largest = middle
        else:
            too_large = middle
    return largest
