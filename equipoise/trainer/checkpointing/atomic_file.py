"""Write a file completely or not at all, and remove files that killed processes left; see `unfinished`."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from equipoise.errors import CheckpointError
from equipoise.parallel.shards.folder import check_replaceable, put_in_place
from equipoise.parallel.unfinished import HAS_LOCKS, clear_unfinished, create_locked_file, umask

__all__ = ["write_at_once"]

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
    check_replaceable(target)
    clear_unfinished(target.parent)
    handle, name = create_locked_file(target)
    file = _Checked(os.fdopen(handle, "wb"))
    try:
        with file.file:
            # 2. The content must be on the disk before the name is.
            write(file)
            file.flush()
            os.fsync(handle)

            # 3. A temporary file is private; a checkpoint has the usual permissions.
            mode = 0o666 & ~umask()
            os.chmod(name, mode)
            # While the file is open, its lock keeps others from clearing it.
            if not HAS_LOCKS:
                file.file.close()
            put_in_place(Path(name), target)
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
