"""Run a repeatable call once more after memory was freed."""

from collections.abc import Callable
from typing import TypeVar

from equipoise.memory.out_of_memory import is_out_of_memory

__all__ = ["with_second_attempt"]

T = TypeVar("T")


def with_second_attempt(function: Callable[[], T], free: Callable[[], None]) -> T:
    """Run a function; if memory runs out, free memory and run it once more.

    Args:
        function: May be run again after it failed in its midst.
        free: Frees memory, such as cached blocks and cycles of objects.

    Returns:
        What the function returns.

    Raises:
        RuntimeError, MemoryError: If memory runs out again; any other error immediately.

    Example:
        >>> with_second_attempt(lambda: 3, lambda: None)
        3
    """
    try:
        return function()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Outside of `except`, whose traceback keeps the tensors of the failed attempt alive.
    free()
    return function()
