"""Read and write checkpoint files: verified when read, written by `atomic_file.py`.

The writer pickles all objects, as Lightning does. The reader is the safe side: it builds data, and a stand-in for any
other object, unless the user trusts the file.
"""

import io
import os
import pickle
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from torch import Tensor

from equipoise.errors import CheckpointError, CheckpointNotFoundError
from equipoise.interop.remote.paths import AnyPath, to_path
from equipoise.trainer.checkpointing.atomic_file import write_atomically

if TYPE_CHECKING:
    from equipoise.interop.remote.files import RemotePath
    from equipoise.safe_loading.archive import OpenArchive

__all__ = [
    "OUR_KEY",
    "check_contents",
    "check_is_file",
    "explaining_reads",
    "is_plain",
    "newest_first",
    "open_checkpoint",
    "pack_checkpoint",
    "read_checkpoint",
    "remove_checkpoint",
    "time_of",
    "write_checkpoint",
]

P = TypeVar("P", bound=str | os.PathLike[str])

# The entry that Lightning's checkpoints do not have.
OUR_KEY = "equipoise"

# Types of plain values, besides containers and tensors.
_PLAIN = (str, int, float, bytes, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


# Writing


def write_checkpoint(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint; after a crash at any moment, the path holds the complete file or its earlier content.

    Args:
        checkpoint: The content.
        path: A local path, or a URL that fsspec knows.

    Raises:
        CheckpointError: If an object in it cannot be pickled, or the disk is full.
    """
    with _explaining(checkpoint, path):
        place = to_path(path)
        if isinstance(place, Path):
            write_atomically(place, lambda file: torch.save(checkpoint, file))
        else:
            _write_elsewhere(checkpoint, place)


def _write_elsewhere(checkpoint: dict[str, Any], path: "RemotePath") -> None:
    """Write a checkpoint elsewhere; other file systems have no locks, and their writers replace a file atomically."""
    aside = None
    if path.is_dir():
        from equipoise.parallel.shards.folder import check_replaceable, put_aside

        # A sharded checkpoint; an incomplete one is not worth the earlier one that may still lie aside.
        check_replaceable(path)
        if time_of(path) is None:
            path.remove()
        else:
            aside = put_aside(path)
    try:
        TorchCheckpointIO().save_checkpoint(checkpoint, os.fspath(path))
    except BaseException:
        if aside is not None:
            aside.rename(path)
        raise
    if aside is not None:
        remove_checkpoint(aside)


def pack_checkpoint(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> bytes:
    """Return the content of a checkpoint's file.

    Args:
        checkpoint: The content.
        path: Its path, for messages.

    Raises:
        CheckpointError: If an object in it cannot be pickled.
    """
    file = io.BytesIO()
    with _explaining(checkpoint, path):
        torch.save(checkpoint, file)
    return file.getvalue()


@contextmanager
def _explaining(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an error of pickle into one that names the object."""
    try:
        yield
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        # These are errors of pickle only if pickle alone fails as well.
        place = _place_that_cannot_be_pickled(checkpoint)
        if place is None:
            raise
        raise CheckpointError(
            f"The checkpoint {os.fspath(path)!r} cannot be written: {place} cannot be pickled ({error}). Leave it"
            " out, for hyperparameters with `save_hyperparameters(ignore=[...])`, or make it a class or function of a"
            " module."
        ) from error


def _place_that_cannot_be_pickled(value: Any, place: str = "") -> str | None:
    """Return the place and class of the first object, in nested containers, that cannot be pickled; None if all can."""
    if isinstance(value, Tensor) or _can_be_pickled(value):
        return None
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list | tuple):
        children = enumerate(value)
    for key, child in children:
        child_place = f"{place}[{key!r}]" if place else repr(key)
        result = _place_that_cannot_be_pickled(child, child_place)
        if result is not None:
            return result
    return f"{place or 'the checkpoint'}, a {type(value).__name__},"


def _can_be_pickled(value: Any) -> bool:
    class Nowhere:
        def write(self, data: Any) -> int:
            return len(data)

    # The protocol of torch.save.
    pickler = pickle.Pickler(Nowhere(), protocol=2)
    try:
        pickler.dump(value)
    except Exception:
        # Methods of the user may raise any error.
        return False
    return True


def is_plain(value: Any) -> bool:
    """Return whether a value consists of plain containers, numbers, strings and tensors."""
    # Derived classes are not plain, so types are compared exactly.
    kind = type(value)
    if kind is dict:
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    if kind in (list, tuple):
        return all(map(is_plain, value))
    return kind is Tensor or kind in _PLAIN


def remove_checkpoint(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint, if there is one: a file, a link, or the folder of a sharded checkpoint.

    Args:
        path: A local path, or a URL that fsspec knows.
    """
    from equipoise.parallel.shards.folder import remove_folder
    from equipoise.parallel.shards.index import INDEX
    from equipoise.parallel.shards.reading import is_sharded_checkpoint

    place = to_path(path)
    if not isinstance(place, Path):
        if is_sharded_checkpoint(place):
            # Without it, the folder is no checkpoint any more.
            (place / INDEX).unlink()
        place.remove()
    elif is_sharded_checkpoint(place) and not place.is_symlink():
        remove_folder(place)
    elif place.exists():
        get_filesystem(place).rm(os.fspath(place), recursive=True)


def time_of(path: str | os.PathLike[str]) -> int | None:
    """Return the time at which a checkpoint was complete, in nanoseconds; None if there is none.

    Args:
        path: The path or URL of a file, or of the folder of a sharded checkpoint.
    """
    place = to_path(path)
    if not isinstance(place, Path) and place.is_dir():
        from equipoise.parallel.shards.index import INDEX

        place /= INDEX
    try:
        return place.stat().st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return None


def newest_first(paths: Iterable[P]) -> list[P]:
    """Return those checkpoints that are complete, the newest first.

    Args:
        paths: Paths or URLs.
    """
    times = {path: time_of(path) for path in paths}
    complete = {path: time for path, time in times.items() if time is not None}
    return sorted(complete, key=lambda path: complete[path], reverse=True)


# Reading


def read_checkpoint(path: AnyPath, *, weights_only: bool = True, values: bool = True) -> dict[str, Any]:
    """Read a checkpoint, with all tensors on the CPU.

    Args:
        path: Its path.
        weights_only: True: no code in the file is run, and objects that are not data become stand-ins. False: all
            objects are created, which runs any code that the file names. Default: True.
        values: Whether to read the values of tensors. Default: True. False: tensors of a file that is read as data are
            on the meta device, which makes it fast for a file of any size.

    Returns:
        The content.

    Raises:
        CheckpointError: If the file is missing, damaged, or is no checkpoint.
    """
    check_is_file(path)
    path_text = os.fspath(path)
    with explaining_reads(path, weights_only=weights_only), get_filesystem(path_text).open(path_text, "rb") as file:
        checkpoint: dict[str, Any]
        if weights_only:
            checkpoint = _read_data(file, values=values)
        else:
            checkpoint = _read_objects(file)
    check_contents(checkpoint, path)
    return checkpoint


@contextmanager
def explaining_reads(path: AnyPath, *, weights_only: bool = True) -> Iterator[None]:
    """Turn any error while a checkpoint is read into a `CheckpointError` that names the file.

    Args:
        path: Its path.
        weights_only: See `read_checkpoint`. Default: True.
    """
    path_text = os.fspath(path)
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"The checkpoint {path_text!r} does not exist.") from error
    except PermissionError as error:
        raise CheckpointError(f"The checkpoint {path_text!r} may not be read by this user.") from error
    except MemoryError as error:
        raise CheckpointError(f"The checkpoint {path_text!r} does not fit into memory.") from error
    except Exception as error:
        # A damaged file may raise any error.
        raise CheckpointError(_unreadable(path, error, weights_only=weights_only)) from error


@contextmanager
def open_checkpoint(path: AnyPath) -> Iterator["OpenArchive"]:
    """Open a checkpoint whose tensors get their values one by one; it is read as data.

    Args:
        path: Its path.

    Yields:
        The open file, with the content of `read_checkpoint(path, values=False)`. Read values in `explaining_reads`.

    Raises:
        CheckpointError: See `read_checkpoint`.
    """
    from equipoise.safe_loading.archive import OpenArchive

    check_is_file(path)
    path_text = os.fspath(path)
    with ExitStack() as open_files:
        with explaining_reads(path):
            file = open_files.enter_context(get_filesystem(path_text).open(path_text, "rb"))
            _check_is_archive(file)
            archive = OpenArchive(file)
        check_contents(archive.content, path)
        yield archive


def _read_data(file: IO[bytes], *, values: bool) -> Any:
    """Read a file without running any code in it."""
    from equipoise.safe_loading.archive import read_archive

    _check_is_archive(file)
    return read_archive(file, values=values)


def _check_is_archive(file: IO[bytes]) -> None:
    from equipoise.safe_loading.archive import is_archive

    if is_archive(file):
        return
    raise CheckpointError(
        "it is no zip archive, as torch has written since version 1.6; `torch.save(torch.load(path), path)` converts a"
        " file of an older version"
    )


def _read_objects(file: IO[bytes]) -> Any:
    """Read a file as torch does, which runs any code that it names."""
    from lightning.pytorch.utilities.migration import pl_legacy_patch

    from equipoise.safe_loading.archive import check_archive, is_archive

    if is_archive(file):
        # Torch does not compare check sums.
        check_archive(file)
        file.seek(0)
    with pl_legacy_patch(), warnings.catch_warnings():
        # Torch warns of its own reader of old files.
        warnings.filterwarnings("ignore", message=".*TypedStorage is deprecated.*")
        return torch.load(file, map_location="cpu", weights_only=False)


def check_is_file(path: AnyPath) -> None:
    """Check that a checkpoint exists.

    Args:
        path: Its path. A file elsewhere is not checked.

    Raises:
        CheckpointNotFoundError: If there is no such file; the message names other checkpoints in the same folder.
    """
    from equipoise.parallel.shards.reading import has_shards

    if not isinstance(path, Path) or path.is_file() or has_shards(path):
        return
    problem = "does not exist"
    folder = path.parent
    if path.is_dir():
        problem = "is a folder"
        folder = path
    hint = ""
    names = sorted(file.name for file in folder.glob("*.ckpt"))
    if names:
        hint = f" In that folder there are: {', '.join(names[:5])}."
    # A word, such as "last", may be misspelt.
    words = get_close_matches(str(path), ("best", "last", "hpc"), n=1)
    if words:
        hint = f" Did you mean {words[0]!r}?"
    raise CheckpointNotFoundError(f"The checkpoint {str(path)!r} {problem}.{hint}")


def _unreadable(path: AnyPath, error: Exception, *, weights_only: bool) -> str:
    """Return the message for a file that cannot be read."""
    reason = str(error)
    if not isinstance(error, CheckpointError):
        # In one line: messages of torch have several.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
    reason = reason.rstrip(".")
    size = f" ({path.stat().st_size} bytes)" if isinstance(path, Path) else ""
    advice = "It is damaged, truncated or no checkpoint at all. Take an earlier one."
    if not weights_only:
        advice = "It is damaged, or the code that it names has changed. Without weights_only=False it is read as data."
    return f"The checkpoint {os.fspath(path)!r}{size} cannot be read: {reason}. {advice}"


def check_contents(checkpoint: Any, path: str | os.PathLike[str]) -> None:
    """Check that the content of a file is a checkpoint of a Trainer.

    Args:
        checkpoint: The content.
        path: The path of the file, for the message.

    Raises:
        CheckpointError: If it is not.
    """
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise CheckpointError(
            f"{os.fspath(path)!r} is no checkpoint of a Trainer: it has no 'state_dict'. Weights alone load with"
            " `load_state_dict`."
        )
