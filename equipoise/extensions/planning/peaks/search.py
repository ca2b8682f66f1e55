"""The largest batch size that fits."""

from collections.abc import Callable

from equipoise.errors import ConfigurationError

__all__ = ["largest_size"]

# The largest answer, for steps whose memory hardly grows with the batch.
_MOST_SAMPLES = 2**24
# Sizes of which two out of three are those that are expected to be the largest.
_EXPECTED = 12


def largest_size(fits: Callable[[int], bool], expects: Callable[[int], bool], start: int) -> int:
    """Return the largest batch size that fits, at most 16.8 million; 0 if none does.

    Expectations that are right cost two sizes beside the first one: the answer, and the next size. With others, at most
    40 sizes are tried.

    Args:
        fits: Returns whether a batch size fits. One at which the step fails with a `ConfigurationError` does not. If
            a size fits, every smaller one does.
        expects: Returns whether a batch size may be expected to fit, from the sizes that were tried.
        start: The size to begin with, from 1.

    Example:
        >>> largest_size(lambda size: size * 3 <= 100, lambda size: size * 3 <= 100, 8)
        33
    """
    largest = 0
    too_large = _MOST_SAMPLES + 1
    tried = 0
    size = start
    while too_large - largest > 1:
        tried += 1
        if _is_true(fits, size):
            largest = size
        else:
            too_large = size
        # In the middle of their logarithms, where memory grows by a law that is not expected.
        size = int((max(largest, 1) * too_large) ** 0.5)
        if tried < _EXPECTED and tried % 3:
            size = _largest_between(expects, largest, too_large)
        size = min(max(size, largest + 1), too_large - 1)
    return largest


def _largest_between(expects: Callable[[int], bool], largest: int, too_large: int) -> int:
    while too_large - largest > 1:
        middle = (largest + too_large) // 2
        if _is_true(expects, middle):
            largest = middle
        else:
            too_large = middle
    return largest


def _is_true(fits: Callable[[int], bool], size: int) -> bool:
    try:
        return fits(size)
    except ConfigurationError:
        return False
