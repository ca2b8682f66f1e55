"""Write a file completely or not at all, and remove files that killed processes left.

The content goes to `.NAME.MACHINE-RANDOM.part` beside the target. At the end this file receives the target's name. The
writer holds a lock on it. The lock ends with the process, so an unlocked file of this machine has no writer any more.
"""

import errno
import hashlib
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from equipoise.errors import CheckpointError

fcntl: Any = None
# Other systems have no such locks, so nothing is cleared there.
if os.name == "posix":
    import fcntl

__all__ = ["write_at_once"]

# A folder may be shared with other machines, whose locks this one need not see.
_MACHINE = hashlib.sha256(platform.node().encode()).hexdigest()[:8]
_UNFINISHED = re.compile(rf"\..+\.{_MACHINE}-[a-z0-9_]{{8}}\.part")

_WITHOUT_SPACE = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is larger than this process may write (`ulimit -f`)",
}


def write_at_once(target: Path, write: Callable[[Any], None]) -> None:
    """Write a file; after a crash at any moment, the path holds the complete file or its earlier content.

    Args:
        target: The path of the file. Its folder is created if it does not exist.
        write: Writes the content to the binary file that is its argument.

    Raises:
        CheckpointError: If the disk is full, or a quota or a limit of the process is reached.
    """
    # 1. A temporary file in the same folder.
    target.parent.mkdir(parents=True, exist_ok=True)
    _clear_unfinished(target.parent)
    handle, name = _create_locked(target)
    file = _Checked(os.fdopen(handle, "wb"))
    try:
        with file.file:
            # 2. The content must be on the disk before the name is.
            write(file)
            file.flush()
            os.fsync(handle)

            # 3. A temporary file is private; a checkpoint has the usual permissions.
            mode = 0o666 & ~_umask()
            os.chmod(name, mode)
            os.replace(name, target)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        # Torch raises an error of its own when writing fails.
        cause = file.error or error
        if isinstance(cause, OSError) and cause.errno in _WITHOUT_SPACE:
            raise _without_space(target, write, cause) from error
        raise


class _Checked:
    """A file that remembers the error of a failed write or flush.

    Args:
        file: The file itself.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all bytes."""
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Pass all bytes to the operating system."""
        try:
            self.file.flush()
        except OSError as error:
            self.error = error
            raise


class _Counter:
    """A file that only counts the bytes that are written to it."""

    def __init__(self) -> None:
        self.count = 0

    def write(self, data: Any) -> int:
        """Count the bytes."""
        self.count += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing."""


def _without_space(target: Path, write: Callable[[Any], None], cause: OSError) -> CheckpointError:
    # Write once more, to learn the size.
    counter = _Counter()
    write(counter)
    free = shutil.disk_usage(target.parent).free
    reason = _WITHOUT_SPACE[cause.errno or 0]
    return CheckpointError(
        f"The checkpoint {str(target)!r} cannot be written: {reason}. It needs {counter.count:,} bytes, and"
        f" {free:,} bytes are free on that disk. Files that were there before are unchanged. Free some space, keep"
        " fewer checkpoints (`ModelCheckpoint(save_top_k=...)`), or choose another `dirpath`."
    )


def _umask() -> int:
    # The value can be read only by setting another one.
    mask = os.umask(0)
    os.umask(mask)
    return mask


# Files of killed processes


def _create_locked(target: Path) -> tuple[int, str]:
    """Create a temporary file beside the target and lock it; return its handle and its name."""
    while True:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.{_MACHINE}-", suffix=".part")
        if not _lock(handle, wait=True):
            return handle, name
        if _is_still(name, handle):
            return handle, name
        # Another process has cleared it before the lock was set.
        os.close(handle)


def _clear_unfinished(folder: Path) -> None:
    """Remove the temporary files of this machine whose writers have ended."""
    for entry in os.scandir(folder):
        if not _UNFINISHED.fullmatch(entry.name):
            continue
        if not entry.is_file(follow_symlinks=False):
            continue
        try:
            handle = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            # It belongs to another user, or another process has just cleared it.
            continue
        try:
            # If no process holds the lock, its writer has ended.
            if _lock(handle, wait=False) and _is_still(entry.path, handle):
                os.unlink(entry.path)
        finally:
            os.close(handle)


def _lock(handle: int, *, wait: bool) -> bool:
    """Lock a file; return whether that succeeded, as some file systems have no locks."""
    if fcntl is None:
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
