"""The places from which a configuration's classes are imported."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["import_paths"]


@contextlib.contextmanager
def import_paths(folders: Sequence[Path]) -> Iterator[None]:
    """Put the parents of folders on Python's path, so that a `_target_` can be imported from there.

    Args:
        folders: The folders with configurations.
    """
    path = sys.path.copy()
    sys.path[:0] = [str(folder.parent) for folder in folders]
    try:
        yield
    finally:
        sys.path[:] = path
