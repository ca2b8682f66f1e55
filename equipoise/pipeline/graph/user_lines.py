"""Lines of the user's code: where a call comes from, and what stops a trace."""

import dis
import inspect
import linecache
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

__all__ = ["describe_obstacle", "is_assertion", "line_of_user"]

_FOLDERS_OF_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parents[2])
_NOT_THE_USERS = tuple(str(folder) + os.sep for folder in _FOLDERS_OF_LIBRARIES)


def line_of_user(frame: FrameType | None, last: CodeType | None = None) -> str:
    """Return the user's line from which a call comes: of the innermost function outside of torch and this package.

    Args:
        frame: The frame of the call.
        last: Code at which to stop. Default: the search goes on to the outermost frame.

    Returns:
        Function, number and text of the line; empty if there is none.
    """
    while frame is not None and frame.f_code is not last:
        code = frame.f_code
        is_of_user = not code.co_filename.startswith(_NOT_THE_USERS)
        if is_of_user:
            return _describe_line(code, frame.f_lineno)
        frame = frame.f_back
    return ""


def _describe_line(code: CodeType, number: int) -> str:
    line = linecache.getline(code.co_filename, number).strip()
    return f"{code.co_qualname}, line {number}: `{line}`"


def describe_obstacle(error: Exception, forward: Callable[..., Any]) -> str:
    """Return the message of an error, and the line of a forward where it was raised.

    Args:
        error: The error, while it is handled.
        forward: The forward.
    """
    message = str(error).strip()
    text = message.split("\n")[0] or type(error).__name__
    is_being_handled = error is sys.exc_info()[1]
    if not is_being_handled:
        return text
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is None:
        return text
    for frame in reversed(inspect.trace()):
        if frame.frame.f_code is code:
            line = _describe_line(code, frame.lineno)
            return f"{line} ({text})"
    return text


def is_assertion(code: CodeType, position: int) -> bool:
    """Return True if the truth value that a function asks for decides about an assertion and nothing else.

    Args:
        code: Code of the function.
        position: Offset of the present instruction.
    """
    following = []
    for instruction in dis.get_instructions(code):
        if instruction.offset >= position and instruction.opname != "TO_BOOL":
            following.append(instruction)
    if len(following) < 2:
        return False

    # An assertion jumps over the instruction that loads its error.
    jump = following[0]
    failing = following[1]
    if "IF_FALSE" in jump.opname:
        # One of several conditions: it jumps to the error.
        targets = [instruction for instruction in following if instruction.offset == jump.argval]
        failing = targets[0] if targets else jump
    is_jump = "JUMP_IF" in jump.opname.replace("_FORWARD", "")
    return is_jump and failing.opname == "LOAD_ASSERTION_ERROR"
