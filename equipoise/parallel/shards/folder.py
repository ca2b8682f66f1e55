"""Folders that are complete or absent: written under another name, and renamed at their end; elsewhere by an index."""

import ctypes
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from equipoise.errors import CheckpointError
from equipoise.interop.remote.files import RemotePath
from equipoise.interop.remote.paths import AnyPath
from equipoise.parallel.shards.index import INDEX, Index, has_only_our_names, is_our_name, read_index
from equipoise.parallel.unfinished_files import HAS_LOCKS, clear_unfinished, create_locked_folder

__all__ = ["RemoteFolder", "UnfinishedFolder", "check_replaceable", "put_aside", "put_in_place", "remove_folder"]

# The end of the name of an earlier checkpoint, while another one takes its place in two steps.
_REPLACED = ".replaced"

# Arguments of the system call `renameat2`, which exchanges two names atomically: AT_FDCWD and RENAME_EXCHANGE.
_PRESENT_FOLDER = -100
_EXCHANGE = 2


class UnfinishedFolder:
    """A folder that gets its name once all of its content is there.

    Args:
        target: The path that it receives at its end.
        check: Raises an error if that path cannot be given up. Default: if it is something else than a checkpoint.

    Raises:
        CheckpointError: By the check.

    Attributes:
        path: The path of the folder until then.
    """

    def __init__(self, target: Path, check: Callable[[Path], None] | None = None) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        (check or check_replaceable)(target)
        clear_unfinished(target.parent)
        self._target = target
        handle, name = create_locked_folder(target)
        # It keeps the lock while it is open.
        self._handle: int | None = handle
        self.path = Path(name)

    def publish(self) -> None:
        """Give the folder its name; an earlier checkpoint of that name is removed afterwards."""
        # The names of the files must be on the disk before that of the folder.
        assert self._handle is not None
        os.fsync(self._handle)
        put_in_place(self.path, self._target)
        self._unlock()

    def discard(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class RemoteFolder:
    """A folder elsewhere, to which a checkpoint is written beside an earlier one, until its index is replaced.

    Args:
        path: The folder.

    Raises:
        CheckpointError: If it has files that belong to no checkpoint.
    """

    def __init__(self, path: RemotePath) -> None:
        check_replaceable(path)
        self._path = path
        # The path of an earlier checkpoint of that name that is a file, until the index is there.
        self._earlier_file: RemotePath | None = None
        if path.is_file():
            self._earlier_file = put_aside(path)
        path.mkdir()

    def check(self, index: Index) -> None:
        """Check that this process sees the files of all.

        Args:
            index: The files and tensors that are to be written.

        Raises:
            CheckpointError: If it does not.
        """
        missing = index.files.keys() - {file.name for file in self._path.iterdir()}
        if missing:
            raise CheckpointError(
                f"The checkpoint {str(self._path)!r} cannot be written: the first process does not see {min(missing)!r}"
                " of another one. Choose a file system that all processes share."
            )

    def publish(self) -> None:
        """Remove the files of earlier saves: the index names the present ones."""
        self._remove_what_no_index_names()

    def discard(self) -> None:
        """Remove the files of a save that has failed: the index, if there is one, names those of an earlier save."""
        self._remove_what_no_index_names()

    def _remove_what_no_index_names(self) -> None:
        # The checkpoint is there, or the first error is the one to be seen. What is left is removed by the next save.
        with suppress(Exception):
            named = self._names_in_index()
            for file in self._path.glob("*"):
                if is_our_name(file.name) and file.name not in named:
                    file.unlink()
            if self._earlier_file is not None and named:
                self._earlier_file.unlink()
            elif self._earlier_file is not None:
                # Into a folder that is still there, it would be moved.
                self._path.rmdir()
                self._earlier_file.rename(self._path)

    def _names_in_index(self) -> set[str]:
        """Return the names of the files of a complete checkpoint; empty if there is no index.

        Raises:
            CheckpointError: If the index cannot be read, so that nothing is known of the files.
        """
        try:
            index = read_index((self._path / INDEX).read_bytes())
        except FileNotFoundError:
            return set()
        return {INDEX, *index.files}


def put_aside(path: RemotePath) -> RemotePath:
    """Rename an earlier checkpoint of another kind, a file or a folder, and return its name until it is removed.

    Args:
        path: The checkpoint.
    """
    earlier = path.with_name(path.name + _REPLACED)
    check_replaceable(earlier)
    earlier.remove()
    return path.rename(earlier)


def put_in_place(path: Path, target: Path) -> None:
    """Give a file or folder its name; an earlier checkpoint of that name is removed afterwards.

    Args:
        path: Its path before, in the folder of the target.
        target: Its path from now on.
    """
    # The system lets a file take the name of another file, but no folder that of what is there.
    has_folder = path.is_dir() or (target.is_dir() and not target.is_symlink())
    if not has_folder or not os.path.lexists(target):
        path.replace(target)
    elif _exchange(path, target):
        _remove(path)
    else:
        _put_in_place_in_two_steps(path, target)


def _put_in_place_in_two_steps(path: Path, target: Path) -> None:
    """Give a folder its name where the file system, such as NFS, cannot exchange two names; see `put_in_place`.

    For a moment nothing has the name. If the process is killed then, the earlier checkpoint keeps a name from which
    nothing but a later one removes it.
    """
    earlier = target.with_name(target.name + _REPLACED)
    if os.path.lexists(earlier):
        _remove(earlier)
    target.rename(earlier)
    try:
        path.rename(target)
    except BaseException:
        earlier.rename(target)
        raise
    _remove(earlier)


def check_replaceable(target: AnyPath) -> None:
    """Check that a path is free, or is that of a checkpoint.

    Args:
        target: The path of a checkpoint that is to be written.

    Raises:
        CheckpointError: If it is a folder with files that belong to no checkpoint.
    """
    is_link = isinstance(target, Path) and target.is_symlink()
    if target.is_dir() and not is_link and not has_only_our_names(target):
        raise CheckpointError(
            f"The checkpoint {str(target)!r} cannot be written: a folder of this name has files that belong to no"
            " checkpoint. Choose another name, or remove the folder."
        )


def remove_folder(path: Path) -> None:
    """Remove a sharded checkpoint, which has no longer its name when its first file is removed.

    Args:
        path: The folder.
    """
    if not HAS_LOCKS:
        # Windows renames no folder to the name of another, so it goes into one.
        outer = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part"))
        path.rename(outer / path.name)
        shutil.rmtree(outer, ignore_errors=True)
        return
    handle, name = create_locked_folder(path)
    try:
        # Over an empty folder a folder can be renamed.
        path.rename(name)
        shutil.rmtree(name, ignore_errors=True)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    """Remove a file, a link or a folder."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        remove_folder(path)


def _exchange(first: Path, second: Path) -> bool:
    """Let two paths exchange what they name, atomically; return False where the system cannot."""
    # Python's own library leads to that of the system, on Linux alone to one with this call.
    call = getattr(ctypes.pythonapi, "renameat2", None)
    if call is None:
        return False
    status: int = call(_PRESENT_FOLDER, os.fsencode(first), _PRESENT_FOLDER, os.fsencode(second), _EXCHANGE)
    return status == 0
