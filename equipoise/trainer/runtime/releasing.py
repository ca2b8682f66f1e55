"""Release everything that a run holds, even if releasing one part fails."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack

__all__ = ["call_all"]


def call_all(steps: Iterable[Callable[[], object]]) -> None:
    """Call functions in order; one that fails keeps none from being called.

    Args:
        steps: The functions.

    Raises:
        BaseException: The error of the last function that failed; the other errors are its context.

    Example:
        >>> called = []
        >>> call_all([lambda: called.append(1), lambda: called.append(2)])
        >>> called
        [1, 2]
    """
    # A stack calls the last function first, and all of them.
    with ExitStack() as stack:
        for step in reversed(list(steps)):
            stack.callback(step)
