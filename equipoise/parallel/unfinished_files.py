"""Files and folders that are being written under another name, and the removal of those that killed processes left.

The content goes to `.NAME.MACHINE-RANDOM.part` beside its target, and at its end this receives the target's name. The
writer holds a lock on it. The lock ends with the process, so what is unlocked on this machine has no writer any more.
"""

import hashlib
import os
import platform
import re
import secrets
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

fcntl: Any = None
# Windows has no such locks, so nothing is cleared there.
with suppress(ImportError):
    import fcntl

__all__ = ["HAS_LOCKS", "clear_unfinished", "create_locked_file", "create_locked_folder", "set_permissions", "umask"]

HAS_LOCKS = fcntl is not None
"""True if the system has such locks. The one that has none, Windows, does not rename a file while it is open."""

# A folder may be shared with other machines, whose locks this one need not see.
_MACHINE = hashlib.sha256(platform.node().encode()).hexdigest()[:8]
_UNFINISHED = re.compile(rf"\..+\.{_MACHINE}-[a-z0-9_]{{8}}\.part")


def create_locked_file(target: Path) -> tuple[int, str]:
    """Create a temporary file beside a target and lock it.

    Args:
        target: The path that the file receives at its end.

    Returns:
        Its handle and its name.
    """
    while True:
        prefix, suffix = _affixes(target)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=prefix, suffix=suffix)
        if _is_ours(handle, name):
            return handle, name


def create_locked_folder(target: Path) -> tuple[int, str]:
    """Create a temporary folder beside a target and lock it.

    Args:
        target: The path that the folder receives at its end.

    Returns:
        Its handle, which keeps the lock while it is open, and its name.
    """
    while True:
        prefix, suffix = _affixes(target)
        # A temporary folder of Python's would be private; this one has the usual permissions.
        name = os.fspath(target.parent / f"{prefix}{secrets.token_hex(4)}{suffix}")
        try:
            os.mkdir(name)
            handle = os.open(name, os.O_RDONLY)
        except (FileExistsError, FileNotFoundError):
            # The name is taken, or another process has cleared the folder.
            if not target.parent.is_dir():
                raise
            continue
        if _is_ours(handle, name):
            return handle, name


def _affixes(target: Path) -> tuple[str, str]:
    """Return how the name of a temporary file begins and ends."""
    return f".{target.name}.{_MACHINE}-", ".part"


def _is_ours(handle: int, name: str) -> bool:
    """Lock what was created; return False, closing it, if another process has cleared it before the lock was set."""
    if not _lock(handle, wait=True) or _is_still(name, handle):
        return True
    os.close(handle)
    return False


def clear_unfinished(folder: Path) -> None:
    """Remove the temporary files and folders of this machine whose writers have ended.

    Args:
        folder: The folder in which they lie.
    """
    if not HAS_LOCKS:
        return
    for entry in os.scandir(folder):
        if not _UNFINISHED.fullmatch(entry.name):
            continue
        flags = os.O_RDWR
        if entry.is_dir(follow_symlinks=False):
            flags = os.O_RDONLY
        elif not entry.is_file(follow_symlinks=False):
            continue
        try:
            handle = os.open(entry.path, flags | os.O_NOFOLLOW)
        except OSError:
            # It belongs to another user, or another process has just cleared it.
            continue
        try:
            # If no process holds the lock, its writer has ended.
            if _lock(handle, wait=False) and _is_still(entry.path, handle):
                _remove(entry)
        finally:
            os.close(handle)


def _remove(entry: os.DirEntry[str]) -> None:
    if entry.is_dir(follow_symlinks=False):
        shutil.rmtree(entry.path, ignore_errors=True)
    else:
        os.unlink(entry.path)


def umask() -> int:
    """Return the permissions that new files of this process do not have."""
    # The value can be read only by setting another one.
    mask = os.umask(0)
    os.umask(mask)
    return mask


def set_permissions(name: str, mode: int) -> None:
    """Give a file its permissions, unless its file system keeps none, as some of networks do.

    Args:
        name: The path of the file.
        mode: The permissions.
    """
    with suppress(PermissionError):
        os.chmod(name, mode)


def _lock(handle: int, *, wait: bool) -> bool:
    """Lock a file; return whether that succeeded, as some file systems have no locks."""
    if not HAS_LOCKS:
        return False
    flags = fcntl.LOCK_EX
    if not wait:
        flags |= fcntl.LOCK_NB
    try:
        fcntl.flock(handle, flags)
    except OSError:
        return False
    return True


def _is_still(name: str, handle: int) -> bool:
    """Return whether a name still belongs to an open file."""
    try:
        by_name = os.stat(name, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(by_name, os.fstat(handle))
