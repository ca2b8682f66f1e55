"""Ways in which a process fails, for tests of what the others do then."""

import os
import signal
import threading

__all__ = ["Mistake", "hangs", "is_killed", "raises"]


class Mistake(Exception):
    """An error that no library raises."""


def raises() -> None:
    """Raise an error in this process."""
    raise Mistake("on purpose")


def is_killed() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def hangs() -> None:
    """Wait for ever."""
    threading.Event().wait()
