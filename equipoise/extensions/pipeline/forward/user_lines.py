"""Lines of the user's code: where a call comes from, and what stops a trace."""

import contextlib
import dis
import linecache
import os
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType

import torch

__all__ = ["is_assertion", "line_of_user"]

_FOLDERS_OF_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parents[3])
# Beginnings of the paths of files that are not the user's.
_NOT_THE_USERS = (*(str(folder) + os.sep for folder in _FOLDERS_OF_LIBRARIES), contextlib.__file__)


def line_of_user(frame: FrameType | None, last: CodeType | None = None) -> str:
    """Return the user's line from which a call comes: of the innermost function outside of torch and this package.

    Args:
        frame: The frame of the call.
        last: Code at which to stop. Default: the search continues to the outermost frame.

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
    text = linecache.getline(code.co_filename, number).strip()
    return f"{code.co_qualname}, line {number}: `{text}`"


def is_assertion(code: CodeType, position: int) -> bool:
    """Return True if the truth value that a function asks for decides about an assertion and nothing else.

    Args:
        code: Code of the function.
        position: Offset of the present instruction.
    """
    # 1. Find the instructions from the present one on. Newer versions of Python convert to bool by one of their own.
    following = []
    for instruction in dis.get_instructions(code):
        if instruction.offset >= position and instruction.opname != "TO_BOOL":
            following.append(instruction)
    if len(following) < 2:
        return False

    # 2. An assertion jumps over the instruction that loads its error.
    jump = following[0]
    failing = following[1]
    if "IF_FALSE" in jump.opname:
        # One of several conditions: it jumps to the error.
        failing = _instruction_at(jump.argval, following) or jump
    is_jump = "JUMP_IF" in jump.opname.replace("_FORWARD", "")
    return is_jump and failing.opname == "LOAD_ASSERTION_ERROR"


def _instruction_at(offset: int, instructions: Iterable[dis.Instruction]) -> dis.Instruction | None:
    for instruction in instructions:
        if instruction.offset == offset:
            return instruction
    return None
