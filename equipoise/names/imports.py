"""Imports of many modules at once."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector during imports of large packages.

    It would look through all that torch and Lightning have created several times, and find nothing to free: about a
    fifth of the time of their imports. Afterwards all objects are of the oldest generation, so that collections of
    young objects do not look through them either.

    Example:
        >>> with collector_paused():
        ...     import equipoise.trainer.trainer
    """
    was_enabled = gc.isenabled()
    num_modules = len(sys.modules)
    if was_enabled:
        # Otherwise garbage of the program would reach the oldest generation, too.
        gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            # `freeze` and `unfreeze` together move all objects to the oldest generation. What a program has frozen
            # itself must stay frozen. Counting frozen objects is slow, so it is done only after an import.
            if len(sys.modules) > num_modules and gc.get_freeze_count() == 0:
                gc.freeze()
                gc.unfreeze()
            gc.enable()
