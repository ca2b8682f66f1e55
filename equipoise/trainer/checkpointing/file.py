"""Checkpoint files: written by `parallel/shards/atomic_file.py`, removed, and ordered by the time of their completion.

The writer pickles all objects, as Lightning does.
"""

import io
import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem

from equipoise.errors import CheckpointError
from equipoise.interop.remote.paths import to_path
from equipoise.parallel.shards.atomic_file import write_atomically

if TYPE_CHECKING:
    from equipoise.interop.remote.files import RemotePath

__all__ = [
    "OUR_KEY",
    "completion_time",
    "newest_first",
    "pack_checkpoint",
    "remove_checkpoint",
    "write_checkpoint",
]

PathT = TypeVar("PathT", bound=str | os.PathLike[str])

# The entry that Lightning's checkpoints do not have.
OUR_KEY = "equipoise"


def write_checkpoint(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint; after a crash at any moment, the path holds the complete file or its earlier content.

    Args:
        checkpoint: The content.
        path: A local path, or a URL that fsspec knows.

    Raises:
        CheckpointError: If an object in it cannot be pickled, or the disk is full.
    """
    with _naming_unpicklable_object(checkpoint, path):
        target = to_path(path)
        if isinstance(target, Path):
            write_atomically(target, lambda file: torch.save(checkpoint, file))
        else:
            _write_elsewhere(checkpoint, target)


def _write_elsewhere(checkpoint: dict[str, Any], path: "RemotePath") -> None:
    """Write a checkpoint to another file system: it has no locks, and its writers replace a file atomically."""
    replaced = None
    if path.is_dir():
        replaced = _put_folder_aside(path)
    try:
        TorchCheckpointIO().save_checkpoint(checkpoint, os.fspath(path))
    except BaseException:
        if replaced is not None:
            replaced.rename(path)
        raise
    if replaced is not None:
        remove_checkpoint(replaced)


def _put_folder_aside(folder: "RemotePath") -> "RemotePath | None":
    """Rename a sharded checkpoint that a file replaces, and return its new path; None if it was incomplete."""
    from equipoise.parallel.shards.folder import check_replaceable, put_aside

    check_replaceable(folder)
    if completion_time(folder) is None:
        # It is not worth the earlier one that may still lie aside.
        folder.remove()
        return None
    return put_aside(folder)


def pack_checkpoint(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> bytes:
    """Return the content of a checkpoint's file.

    Args:
        checkpoint: The content.
        path: Its path, for messages.

    Raises:
        CheckpointError: If an object in it cannot be pickled.
    """
    file = io.BytesIO()
    with _naming_unpicklable_object(checkpoint, path):
        torch.save(checkpoint, file)
    return file.getvalue()


@contextmanager
def _naming_unpicklable_object(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an error of pickle into one that names the object."""
    try:
        yield
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        from equipoise.trainer.checkpointing.unpicklable_entries import describe_unpicklable

        # These are errors of pickle only if pickle alone fails as well.
        description = describe_unpicklable(checkpoint)
        if description is None:
            raise
        raise CheckpointError(
            f"The checkpoint {os.fspath(path)!r} cannot be written: {description} cannot be pickled ({error}). Leave it"
            " out, for hyperparameters with `save_hyperparameters(ignore=[...])`, or make it a class or function of a"
            " module."
        ) from error


def remove_checkpoint(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint, if there is one: a file, a link, or the folder of a sharded checkpoint.

    Args:
        path: A local path, or a URL that fsspec knows.
    """
    from equipoise.parallel.shards.folder import remove_folder
    from equipoise.parallel.shards.index import INDEX
    from equipoise.parallel.shards.reading import is_sharded_checkpoint

    target = to_path(path)
    if not isinstance(target, Path):
        if is_sharded_checkpoint(target):
            # Without it, the folder is no checkpoint any more.
            (target / INDEX).unlink()
        target.remove()
    elif is_sharded_checkpoint(target) and not target.is_symlink():
        remove_folder(target)
    elif target.exists():
        get_filesystem(target).rm(os.fspath(target), recursive=True)


def completion_time(path: str | os.PathLike[str]) -> int | None:
    """Return the time at which a checkpoint was complete, in nanoseconds; None if there is none.

    Args:
        path: The path or URL of a file, or of the folder of a sharded checkpoint.
    """
    file = to_path(path)
    if not isinstance(file, Path) and file.is_dir():
        from equipoise.parallel.shards.index import INDEX

        file /= INDEX
    try:
        return file.stat().st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return None


def newest_first(paths: Iterable[PathT]) -> list[PathT]:
    """Return those checkpoints that are complete, the newest first.

    Args:
        paths: Paths or URLs.
    """
    times = {path: completion_time(path) for path in paths}
    complete = {path: time for path, time in times.items() if time is not None}
    return sorted(complete, key=lambda path: complete[path], reverse=True)
