"""Read checkpoint files, verified: missing, damaged and foreign ones are errors that name the file.

A file is read as data, with a stand-in for any other object, unless the user trusts it.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem

from equipoise.errors import CheckpointError, CheckpointNotFoundError
from equipoise.interop.remote.paths import AnyPath

if TYPE_CHECKING:
    from equipoise.safe_loading.archive import OpenArchive

__all__ = ["check_contents", "check_is_file", "explaining_reads", "open_checkpoint", "read_checkpoint"]


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
    """Check that torch has written a file as a zip archive.

    Raises:
        CheckpointError: If not. Its text is a reason, which `explaining_reads` completes.
    """
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
        problem = "is a folder, not a file in it"
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
