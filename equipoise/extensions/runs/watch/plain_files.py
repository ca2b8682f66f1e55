"""Read files below a folder into which others may write: no link is followed, wherever it stands in the path."""

import os
import stat
from pathlib import Path

__all__ = ["read_below"]

# Systems without these cannot be asked to refuse links.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
_BINARY = getattr(os, "O_BINARY", 0)


def read_below(folder: Path, path: Path, most: int) -> bytes:
    """Return the content of a file.

    Args:
        folder: A folder above it, no link itself. Folders above this one are followed as usual.
        path: The file, with the folder's path at its beginning.
        most: Maximum number of bytes.

    Raises:
        OSError: If it is missing, no plain file, larger, or behind a link.
    """
    *parents, name = path.relative_to(folder).parts
    # 1. From folder to folder, so that none can be put in the place of another meanwhile.
    opened = []
    try:
        here = None
        if os.open in os.supports_dir_fd:
            here = os.open(folder, os.O_RDONLY | _NO_LINK)
            opened.append(here)
            for parent in parents:
                here = os.open(parent, os.O_RDONLY | _NO_LINK | _NO_WAIT, dir_fd=here)
                opened.append(here)
        else:
            name = str(path)
        # 2. The file.
        number = os.open(name, os.O_RDONLY | _NO_LINK | _NO_WAIT | _BINARY, dir_fd=here)
        opened.append(number)
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            raise OSError(f"{path} is no plain file of at most {most:,} bytes")
        with os.fdopen(os.dup(number), "rb") as file:
            return file.read(most)
    finally:
        for number in opened:
            os.close(number)
