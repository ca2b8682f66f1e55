"""Write a file completely or not at all, and remove files that killed processes left; see `unfinished`."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from equipoise.parallel.shards.disk_faults import is_limit, limit_error
from equipoise.parallel.unfinished_files import HAS_LOCKS, clear_unfinished, create_locked_file, set_permissions, umask

__all__ = ["write_atomically"]


def write_atomically(target: Path, write: Callable[[Any], None]) -> None:
    """Write a file; after a crash at any moment, the path holds the complete file or its earlier content.

    Args:
        target: The path of the file. Its folder is created if it does not exist.
        write: Writes the content to the binary file that is its argument.

    Raises:
        CheckpointError: If the disk is full, or a quota or a limit of the process is reached.
    """
    try:
        _write_atomically(target, write)
    except OSError as error:
        if not is_limit(error):
            raise
        raise limit_error(target, error, _size_of(write)) from error


def _write_atomically(target: Path, write: Callable[[Any], None]) -> None:
    # 1. A temporary file in the same folder.
    target.parent.mkdir(parents=True, exist_ok=True)
    replaces_folder = target.is_dir() and not target.is_symlink()
    if replaces_folder:
        # A sharded checkpoint.
        from equipoise.parallel.shards.folder import check_replaceable

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
            set_permissions(name, 0o666 & ~umask())
            # While the file is open, its lock keeps others from clearing it.
            if not HAS_LOCKS:
                file.file.close()
            if replaces_folder:
                from equipoise.parallel.shards.folder import put_in_place

                put_in_place(Path(name), target)
            else:
                os.replace(name, target)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        # Torch raises an error of its own when writing fails.
        cause = file.error or error
        if cause is not error and is_limit(cause):
            raise cause from error
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


def _size_of(write: Callable[[Any], None]) -> int:
    """Return the number of bytes of a content, which is written once more to count them."""
    counter = _Counter()
    write(counter)
    return counter.count
