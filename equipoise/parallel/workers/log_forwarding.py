"""Forward log records of a worker to the loggers of its parent."""

import logging
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["hand_on", "install", "levels", "one_at_a_time"]


def one_at_a_time(send: Callable[[Any], None]) -> Callable[[Any], None]:
    """The same for any number of threads: what a connection sends in pieces must not be mixed."""
    lock = threading.Lock()

    def locked(message: Any) -> None:
        with lock:
            send(message)

    return locked


def levels() -> dict[str, int]:
    """The levels of all loggers that have one of their own; that of the root under an empty name."""
    known = {name: each for name, each in logging.root.manager.loggerDict.items() if isinstance(each, logging.Logger)}
    return {"": logging.root.level, **{name: each.level for name, each in known.items() if each.level}}


def install(send: Callable[[Any], None], levels: dict[str, int]) -> None:
    """Lets this process hand its records to the parent.

    Args:
        send: Sends something to the parent.
        levels: The parent's levels, by name.
    """
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    logging.root.addHandler(_Sender(send))


def hand_on(record: logging.LogRecord) -> None:
    """Hands a worker's record to the handlers of this process."""
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


class _Sender(logging.Handler):
    """Sends records; not those of loggers that have handlers here, which have written them already."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Sends a record as text, since its arguments may be anything."""
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None and logger is not logging.root:
            if logger.handlers:
                return
            logger = logger.parent
        try:
            message = record.getMessage()
            if record.exc_info:
                message = f"{message}\n{logging.Formatter().formatException(record.exc_info)}"
            told = logging.makeLogRecord({**vars(record), "msg": message, "args": None, "exc_info": None})
            self._send(told)
        except Exception:
            self.handleError(record)
