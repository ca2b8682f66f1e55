"""Obstacles in a traced step: values that it does not have, files that it writes, errors; with the lines of each."""

import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from equipoise.errors import ConfigurationError, in_one_line
from equipoise.extensions.leaks.references import is_of_user

__all__ = ["Notes", "line_of_error", "reason_of", "refuse_side_effects"]

# Events of Python's audit that leave something behind, and what the user reads of them.
_SIDE_EFFECTS = {
    "os.mkdir": "creates the folder",
    "os.remove": "removes the file",
    "os.rename": "renames the file",
    "socket.connect": "connects to a server",
    "subprocess.Popen": "starts the program",
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT


class Notes:
    """Sentences on what was guessed, each once, with the user's line.

    Attributes:
        lines: The sentences.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, sentence: str) -> None:
        """Add a sentence on what happens at the present line of the user's code."""
        place = _user_line(inspect.currentframe())
        text = sentence
        if place:
            text = f"{place}: {sentence}"
        if text not in self.lines:
            self.lines.append(text)


def reason_of(error: Exception) -> str:
    """Return one sentence on an error of a step, with the user's line."""
    place = line_of_error(error)
    if place and not isinstance(error, ConfigurationError):
        return f"{place}: {in_one_line(error)}"
    return in_one_line(error)


def line_of_error(error: BaseException) -> str:
    """Return the innermost line of the user's code in an error's traceback, as "file:line"; empty without one."""
    # The last one of the user's frames is the innermost.
    place = ""
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if is_of_user(file):
            place = f"{Path(file).name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place


def _user_line(frame: FrameType | None) -> str:
    """Return the innermost line of the user's code, as "file:line"; empty without one, and while Python imports."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith("<frozen importlib"):
            return ""
        if is_of_user(file):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


# One entry for each step that may leave nothing behind now.
_guarded: list[object] = []


@contextmanager
def refuse_side_effects() -> Iterator[None]:
    """Refuse files, folders, programs and connections of the user's code in a `with` block.

    Raises:
        ConfigurationError: Where the code begins one; the message names the line.
    """
    _add_hook()
    step = object()
    _guarded.append(step)
    try:
        yield
    finally:
        _guarded.remove(step)


@cache
def _add_hook() -> None:
    """Add the hook of Python's audit, once, because it cannot be removed again."""
    sys.addaudithook(_check)


def _check(event: str, args: tuple[Any, ...]) -> None:
    """Refuse what leaves something behind."""
    if not _guarded:
        return
    effect = _SIDE_EFFECTS.get(event)
    if event == "open" and _writes(args):
        effect = "writes the file"
    if effect is None:
        return
    place = _user_line(inspect.currentframe())
    if place:
        raise ConfigurationError(
            f"The training step {effect} {args[0]!r} at {place}, but a plan runs it several times and must leave"
            " nothing behind. Do so in a callback."
        )


def _writes(args: tuple[Any, ...]) -> bool:
    """Return True if the arguments of the event "open" are those of a file to be written."""
    path, mode, flags = args
    if not isinstance(path, (str, bytes, os.PathLike)) or os.fspath(path) in (os.devnull, os.fsencode(os.devnull)):
        return False
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(flags & _WRITING)
