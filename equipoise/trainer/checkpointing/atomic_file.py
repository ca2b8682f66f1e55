"""Write a file completely or not at all, and remove files that killed processes left.

The content goes to `.NAME.MACHINE-RANDOM.part` beside the target, which takes the target's name at the end. The writer
holds a lock on it. The lock ends with the process, so an unlocked file of this machine has no writer any more.
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
if os.name == "posix":  # elsewhere there are no such locks, and nothing is cleared
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
    """Write a file; after a crash at any moment, the path holds the whole file or what it held before.

    Args:
        target: The path of the file. Its folder is created if there is none.
        write: Writes the content to the binary file that it gets.

    Raises:
        CheckpointError: If the disk is full, or a quota or a limit of the process is reached.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _clear_unfinished(target.parent)
    handle, name = _create_locked(target)
    file = _Checked(os.fdopen(handle, "wb"))
    try:
        with file.file:
            write(file)
            file.flush()
            os.fsync(handle)
            os.chmod(name, 0o666 & ~_umask())  # a temporary file is private, a checkpoint need not be
            os.replace(name, target)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        cause = file.error or error  # torch raises an error of its own when writing fails
        if isinstance(cause, OSError) and cause.errno in _WITHOUT_SPACE:
            raise _without_space(target, write, cause) from error
        raise


class _Checked:
    """A file that remembers the error of a failed write, closing included.

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
        """Hand everything to the operating system."""
        try:
            self.file.flush()
        except OSError as error:
            self.error = error
            raise


class _Counter:
    """A file that only counts what is written to it."""

    def __init__(self) -> None:
        self.count = 0

    def write(self, data: Any) -> int:
        """Count the bytes."""
        self.count += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing."""


def _without_space(target: Path, write: Callable[[Any], None], cause: OSError) -> CheckpointError:
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
    mask = os.umask(0)
    os.umask(mask)
    return mask


# Files of killed processes


def _create_locked(target: Path) -> tuple[int, str]:
    """Create a temporary file beside the target and lock it; return its handle and its name."""
    while True:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.{_MACHINE}-", suffix=".part")
        if not _lock(handle, wait=True) or _is_still(name, handle):
            return handle, name
        os.close(handle)  # another process has cleared it before the lock was set


def _clear_unfinished(folder: Path) -> None:
    """Remove the temporary files of this machine whose writers have ended."""
    for entry in os.scandir(folder):
        if not _UNFINISHED.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
            continue
        try:
            handle = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or another process has just cleared it
        try:
            if _lock(handle, wait=False) and _is_still(entry.path, handle):
                os.unlink(entry.path)
        finally:
            os.close(handle)


def _lock(handle: int, *, wait: bool) -> bool:
    """Lock a file; return whether that succeeded: some file systems know no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _is_still(name: str, handle: int) -> bool:
    """Return whether a name still belongs to an open file."""
    try:
        return os.path.samestat(os.stat(name, follow_symlinks=False), os.fstat(handle))
    except FileNotFoundError:
        return False
