"""Checkpoint files: written completely or not at all, and verified when read.

Objects are written as they are, as Lightning does. Safety is the reader's: it builds data, and puts a stand-in for any
other object unless the user says otherwise.
"""

import os
import pickle
import warnings
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.utilities.migration import pl_legacy_patch
from torch import Tensor

from equipoise.errors import CheckpointError
from equipoise.safe_loading.archive import check_archive, is_archive, read_archive, read_legacy
from equipoise.trainer.checkpointing.atomic_file import write_at_once

__all__ = ["check_contents", "check_is_file", "is_plain", "read_checkpoint", "write_checkpoint"]

_PLAIN = (str, int, float, bytes, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


# Writing


def write_checkpoint(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint; after a crash at any moment, the path holds the whole file or what it held before.

    Args:
        checkpoint: What to write.
        path: A local path, or a URL that fsspec knows.

    Raises:
        CheckpointError: If something in it cannot be pickled, or the disk is full.
    """
    try:
        if _is_remote(path):
            TorchCheckpointIO().save_checkpoint(checkpoint, os.fspath(path))
        else:
            write_at_once(Path(path), lambda file: torch.save(checkpoint, file))
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        place = _place_that_cannot_be_pickled(checkpoint)
        if place is None:
            raise
        raise CheckpointError(
            f"The checkpoint {os.fspath(path)!r} cannot be written: {place} cannot be pickled ({error}). Leave it"
            " out, for hyperparameters with `save_hyperparameters(ignore=[...])`, or make it a class or function of a"
            " module."
        ) from error


def _place_that_cannot_be_pickled(value: Any, place: str = "the checkpoint") -> str | None:
    """Return where in nested containers the first value is that cannot be pickled; None if all can."""
    if isinstance(value, Tensor) or _can_be_pickled(value):
        return None
    children: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list | tuple):
        children = list(enumerate(value))
    for key, child in children:
        name = repr(key) if place == "the checkpoint" else f"{place}[{key!r}]"
        if found := _place_that_cannot_be_pickled(child, name):
            return found
    return f"{place}, a {type(value).__name__},"


def _can_be_pickled(value: Any) -> bool:
    class Nowhere:
        def write(self, data: Any) -> int:
            return len(data)

    try:
        pickle.Pickler(Nowhere(), protocol=2).dump(value)
    except Exception:
        return False
    return True


def is_plain(value: Any) -> bool:
    """Return whether a value consists of plain containers, numbers, strings and tensors."""
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(map(is_plain, [*value, *value.values()]))
    return type(value) in (*_PLAIN, Tensor)


# Reading


def read_checkpoint(path: str | os.PathLike[str], *, weights_only: bool = True) -> dict[str, Any]:
    """Read a checkpoint, with all tensors on the CPU.

    Args:
        path: A local path, or a URL that fsspec knows.
        weights_only: True: nothing in the file is run, and objects that are not data become stand-ins. False: objects
            are created as they were, which runs whatever code the file names. Default: True.

    Raises:
        CheckpointError: If the file is missing, damaged, or is no checkpoint.
    """
    check_is_file(path)
    read = _read_data if weights_only else _read_objects
    try:
        with get_filesystem(os.fspath(path)).open(os.fspath(path), "rb") as file:
            checkpoint: dict[str, Any] = read(file)
    except FileNotFoundError as error:
        raise CheckpointError(f"There is no checkpoint at {os.fspath(path)!r}.") from error
    except PermissionError as error:
        raise CheckpointError(f"The checkpoint {os.fspath(path)!r} may not be read by this user.") from error
    except MemoryError as error:
        raise CheckpointError(f"The checkpoint {os.fspath(path)!r} does not fit into memory.") from error
    except Exception as error:  # a damaged file fails in many ways
        raise CheckpointError(_unreadable(path, error, weights_only=weights_only)) from error
    check_contents(checkpoint, path)
    return checkpoint


def _read_data(file: IO[bytes]) -> Any:
    """Read a file without running anything that stands in it."""
    return read_archive(file) if is_archive(file) else read_legacy(file)


def _read_objects(file: IO[bytes]) -> Any:
    """Read a file as torch does, with whatever code it names."""
    if is_archive(file):
        check_archive(file)  # torch does not compare check sums
        file.seek(0)
    with pl_legacy_patch(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*TypedStorage is deprecated.*")
        return torch.load(file, map_location=_on_cpu, weights_only=False)


def _on_cpu(storage: Any, location: str) -> Any:
    """Read everything to the CPU: the devices of the writing run may not be there."""
    return storage


def _is_remote(path: str | os.PathLike[str]) -> bool:
    return "://" in os.fspath(path)


def check_is_file(path: str | os.PathLike[str]) -> None:
    """Check that a checkpoint exists.

    Args:
        path: Its path. The address of a remote file, as `s3://...`, is not looked up.

    Raises:
        CheckpointError: If there is no such file; it names others in the same folder.
    """
    if not _is_remote(path):
        _check_is_file(Path(path))


def _check_is_file(path: Path) -> None:
    if path.is_file():
        return
    what = "does not exist"
    folder = path.parent
    if path.is_dir():
        what = "is a folder"
        folder = path
    beside = sorted(p.name for p in folder.glob("*.ckpt"))[:5]
    hint = f" In that folder there are: {', '.join(beside)}." if beside else ""
    raise CheckpointError(f"The checkpoint {str(path)!r} {what}.{hint}")


def _unreadable(path: str | os.PathLike[str], error: Exception, *, weights_only: bool) -> str:
    reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
    if isinstance(error, CheckpointError):
        reason = str(error).rstrip(".")
    size = ""
    if not _is_remote(path):
        size = f" ({Path(path).stat().st_size} bytes)"
    advice = "It is damaged, truncated or no checkpoint at all. Take an earlier one."
    if not weights_only:
        advice = "It is damaged, or the code that it names has changed. Without weights_only=False it is read as data."
    return f"The checkpoint {os.fspath(path)!r}{size} cannot be read: {reason}. {advice}"


def check_contents(checkpoint: Any, path: str | os.PathLike[str]) -> None:
    """Check that what was read is a checkpoint of a Trainer.

    Raises:
        CheckpointError: If it is not.
    """
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise CheckpointError(
            f"{os.fspath(path)!r} is no checkpoint of a Trainer: it has no 'state_dict'. Weights alone load with"
            " `load_state_dict`."
        )
