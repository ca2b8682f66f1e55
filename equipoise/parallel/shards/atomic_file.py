"""Write a file completely or not at all, and remove files that killed processes left; see `unfinished_files`."""

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
        target: The path of the file. Its folder is created if it does not exist. A file that is replaced hands on its
            permissions.
        write: Writes the content to the binary file that is its argument, by its methods `write` and `flush`.

    Raises:
        CheckpointError: If the disk is full, or a quota or a limit of the process is reached.
    """
    file = _Counted()
    try:
        _write_atomically(target, write, file)
    except OSError as error:
        if not is_limit(error):
            raise
        raise limit_error(target, error, file.size) from error


def _write_atomically(target: Path, write: Callable[[Any], None], file: "_Counted") -> None:
    # 1. A temporary file in the same folder.
    target.parent.mkdir(parents=True, exist_ok=True)
    replaces_folder = target.is_dir() and not target.is_symlink()
    if replaces_folder:
        # A sharded checkpoint.
        from equipoise.parallel.shards.folder import check_replaceable

        check_replaceable(target)
    clear_unfinished(target.parent)
    handle, name = create_locked_file(target)
    try:
        with os.fdopen(handle, "wb") as file.file:
            # 2. The content must be on the disk before the name is.
            write(file)
            file.flush()
            if file.error is not None:
                raise file.error
            os.fsync(handle)

            # 3. A temporary file is private; a checkpoint has the usual permissions.
            mode = 0o666 & ~umask()
            if target.is_file():
                mode = target.stat().st_mode
            set_permissions(name, mode)
            # While the file is open, its lock keeps others from clearing it.
            if not HAS_LOCKS:
                file.file.close()
            if replaces_folder:
                from equipoise.parallel.shards.folder import put_in_place

                put_in_place(Path(name), target)
            else:
                os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


class _Counted:
    """A file that counts its bytes, and goes on counting once it can write no more, so that the user learns the size.

    Attributes:
        file: The file itself; None before it is open.
        size: The number of bytes that the content has, in the file or not.
        error: The first error, which torch would hide behind one of its own.
    """

    def __init__(self) -> None:
        self.file: IO[bytes] | None = None
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Count bytes, and write them unless an earlier write has failed."""
        count = len(data)
        self.size += count
        if self.file is not None and self.error is None:
            try:
                self.file.write(data)
            except OSError as error:
                self.error = error
        return count

    def flush(self) -> None:
        """Pass all bytes to the operating system."""
        if self.file is not None and self.error is None:
            try:
                self.file.flush()
            except OSError as error:
                self.error = error
