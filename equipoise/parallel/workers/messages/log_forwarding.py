"""Forward log records of a worker to the loggers of its parent."""

import logging
import threading
from collections.abc import Callable
from logging.handlers import QueueHandler
from typing import Any

__all__ = ["hand_on", "install", "levels", "one_at_a_time"]

# Sends a message to the parent.
Send = Callable[[Any], None]


def one_at_a_time(send: Send) -> Send:
    """Return a function that several threads may call. A connection sends a large message in parts, not to be mixed.

    Args:
        send: Function that sends a message; one thread at a time calls it.
    """
    lock = threading.Lock()

    def locked(message: Any) -> None:
        with lock:
            send(message)

    return locked


def levels() -> dict[str, int]:
    """Return the levels of all loggers with a level, by name; that of the root under an empty name."""
    levels_by_name = {"": logging.root.level}
    # Python 3.11 has no documented way to them. Without it, workers have the level of the root alone.
    loggers = getattr(logging.root.manager, "loggerDict", {})
    for name, logger in loggers.items():
        # The dictionary also holds placeholders for parents that no code has asked for.
        if isinstance(logger, logging.Logger) and logger.level:
            levels_by_name[name] = logger.level
    return levels_by_name


def install(send: Send, levels: dict[str, int]) -> None:
    """Forward the log records of this process to the parent.

    Args:
        send: Function that sends a record to the parent.
        levels: Levels of the parent's loggers by name.
    """
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    logging.root.addHandler(_Sender(send))


def hand_on(record: logging.LogRecord) -> None:
    """Pass a worker's record to the handlers of this process."""
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


class _Sender(QueueHandler):
    """Sends records to the parent as text, except those that a handler of this process has written."""

    def __init__(self, send: Send) -> None:
        super().__init__(send)  # type: ignore[arg-type]
        self._send = send

    def enqueue(self, record: logging.LogRecord) -> None:
        """Send a record."""
        self._send(record)

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record unless a handler of this process has written it. A failure does not end the program."""
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None and logger is not logging.root:
            if logger.handlers:
                return
            logger = logger.parent
        super().emit(record)
