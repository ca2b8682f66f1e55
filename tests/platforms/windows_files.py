"""The rules of Windows for files, on Linux.

A file that is open, or mapped into memory, is neither renamed, replaced nor removed. A folder is not opened.
`os.rename` replaces nothing. Names contain none of some characters.
"""

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from tests.platforms.absences import is_called_by

__all__ = ["restrict_files"]

# Under POSIX it opens the folder of a file first, and removes files that are open.
_TEMPORARY_FILES = ("tempfile",)
_FORBIDDEN = set('<>:"|?*\\')
_OPEN_FILES = Path("/proc/self/fd")
_MAPPED_FILES = Path("/proc/self/maps")


def restrict_files() -> None:
    """Let the rules hold in this process from now on."""
    rename = os.rename

    def careful_rename(source: Any, target: Any, **options: Any) -> None:
        if os.path.lexists(target):
            raise FileExistsError(17, "Cannot create a file when that file already exists", os.fspath(target))
        rename(source, target, **options)

    os.rename = careful_rename
    sys.addaudithook(_check)


def _check(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        path, _, flags = arguments
        # A number is a file that is open already.
        if not isinstance(path, int):
            _check_opened(os.fsdecode(path), flags)
    elif event == "os.mkdir":
        _check_name(os.fsdecode(arguments[0]))
    elif event == "os.rename":
        source, target = (os.fsdecode(path) for path in arguments[:2])
        _check_unused(source)
        _check_unused(target)
        _check_name(target)
    elif event == "os.remove":
        _check_unused(os.fsdecode(arguments[0]))


def _check_opened(path: str, flags: int) -> None:
    if os.path.isdir(path) and not is_called_by(_TEMPORARY_FILES):
        raise PermissionError(13, "Permission denied", path)
    if flags & os.O_CREAT:
        _check_name(path)


def _check_name(path: str) -> None:
    name = os.path.basename(path.rstrip("/"))
    if not _FORBIDDEN.isdisjoint(name) or name.endswith((".", " ")):
        raise OSError(22, "The filename, directory name, or volume label syntax is incorrect", path)


def _check_unused(path: str) -> None:
    """Refuse a file or folder of which this process uses something."""
    if is_called_by(_TEMPORARY_FILES):
        return
    path = os.path.realpath(path)
    used = [line.partition("/")[1:] for line in _MAPPED_FILES.read_text(encoding="utf-8").splitlines()]
    paths = {"".join(parts) for parts in used}
    for descriptor in os.listdir(_OPEN_FILES):
        link = _OPEN_FILES / descriptor
        # That of the list itself is closed by now.
        if os.path.islink(link):
            paths.add(os.readlink(link))
    if any(Path(name).is_relative_to(path) for name in paths):
        _refuse(path)


def _refuse(path: str) -> NoReturn:
    raise PermissionError(13, "The process cannot access the file because it is being used by another process", path)
