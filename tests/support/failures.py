"""Ways in which a process fails, for tests of what the others do then."""

import os
import signal
import sys
import threading

__all__ = ["Mistake", "hangs", "is_killed", "leaves", "raises"]


class Mistake(Exception):
    """An error of the user's own."""


def raises() -> None:
    raise Mistake("on purpose")


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leaves() -> None:
    sys.exit(3)


def hangs() -> None:
    threading.Event().wait()
