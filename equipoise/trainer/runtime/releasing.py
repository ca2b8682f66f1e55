"""Release everything that a run holds, even if releasing one part fails."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack

__all__ = ["call_all"]


def call_all(steps: Iterable[Callable[[], object]]) -> None:
    """Call functions in order; one that fails keeps none from being called.

    Args:
        steps: The functions.

    Raises:
        BaseException: What the last of those that failed raised; the others are its context.

    Example:
        >>> called = []
        >>> call_all([lambda: called.append(1), lambda: called.append(2)])
        >>> called
        [1, 2]
    """
    with ExitStack() as stack:  # which calls what was given last first
        for step in reversed(list(steps)):
            stack.callback(step)
