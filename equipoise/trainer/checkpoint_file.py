"""Checkpoint files: written at once or not at all, verified when read, and nothing in them is ever run.

Reading allows tensors, plain containers and OmegaConf's containers, which Lightning's checkpoints hold. So that our
own can always be read back, hyperparameters are made plain before they are written.
"""

import collections
import os
import sys
import tempfile
import typing
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from equipoise.errors import CheckpointError

__all__ = ["check_is_file", "is_plain", "plain", "read_checkpoint", "write_checkpoint"]

_BASES = (str, int, float, bytes, complex)  # a class derived from one of them would come along into the file
_PLAIN = (*_BASES, bool, type(None), torch.dtype, torch.device, torch.Size)


# Writing


def write_checkpoint(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes a checkpoint; after a crash at any moment, the path holds the whole file or what it held before.

    Args:
        checkpoint: What to write.
        path: A local path, or a URL that fsspec knows.
    """
    if _is_remote(path):
        TorchCheckpointIO().save_checkpoint(checkpoint, os.fspath(path))
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())  # a temporary file is private, a checkpoint need not be
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def plain(value: Any, name: str = "hyper_parameters") -> Any:
    """A copy made of plain containers, numbers, strings and tensors, which any reader can load without running code.

    Args:
        value: Anything; OmegaConf's containers are resolved where they can be.
        name: What to call it in the warning about a value that has no plain form, and is left out.
    """
    if type(value) in _PLAIN or isinstance(value, Tensor):
        return value
    if isinstance(value, Enum):
        return plain(value.value, name)
    if base := next((base for base in _BASES if isinstance(value, base)), None):
        return base(value)
    if (omegaconf := sys.modules.get("omegaconf")) is not None and isinstance(value, omegaconf.Container):
        return plain(_resolved(value, omegaconf), name)
    if isinstance(value, Namespace):
        return plain(vars(value), name)
    if isinstance(value, Mapping):
        made = {key: plain(item, f"{name}[{key!r}]") for key, item in value.items()}
        return {key: item for key, item in made.items() if item is not _NOTHING}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [
            item
            for item in (plain(item, f"{name}[{index}]") for index, item in enumerate(value))
            if item is not _NOTHING
        ]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(getattr(value, "tolist", None)):  # numpy's arrays and numbers
        return value.tolist()
    rank_zero_warn(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold safely; it is left out. See"
        " `save_hyperparameters(ignore=...)`."
    )
    return _NOTHING


_NOTHING = object()


def _resolved(config: Any, omegaconf: Any) -> Any:
    """The containers of a configuration; as it was written, where a value is missing or refers to one that is."""
    try:
        return omegaconf.OmegaConf.to_container(config, resolve=not omegaconf.OmegaConf.missing_keys(config))
    except omegaconf.errors.OmegaConfBaseException:
        return omegaconf.OmegaConf.to_container(config, resolve=False)


def is_plain(value: Any) -> bool:
    """Whether a value consists of plain containers, numbers, strings and tensors, and can be read back as it is."""
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(map(is_plain, [*value, *value.values()]))
    return type(value) in (*_PLAIN, Tensor)


# Reading


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a checkpoint without running anything that stands in it.

    Args:
        path: A local path, or a URL that fsspec knows.

    Raises:
        CheckpointError: If the file is missing, damaged, holds objects that are not allowed, or is no checkpoint.
    """
    if not _is_remote(path):
        _verify(Path(path))
    try:
        with torch.serialization.safe_globals(_safe_globals()), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*TypedStorage is deprecated.*")
            checkpoint = TorchCheckpointIO().load_checkpoint(os.fspath(path), map_location=_on_cpu, weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"There is no checkpoint at {os.fspath(path)!r}.") from error
    except Exception as error:
        if "Weights only load failed" in str(error) or "Unsupported" in str(error):
            raise _unsafe(path) from error
        raise CheckpointError(
            f"The checkpoint {os.fspath(path)!r} cannot be read: {str(error).rstrip('.')}."
        ) from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise CheckpointError(
            f"{os.fspath(path)!r} is no checkpoint of a Trainer: it has no 'state_dict'. Weights alone load with"
            " `load_state_dict`."
        )
    return checkpoint


def _on_cpu(storage: Any, location: str) -> Any:
    """Everything is read to the CPU: the devices of the writing run may not be there."""
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
    if not path.is_file():
        what, folder = ("is a folder", path) if path.is_dir() else ("does not exist", path.parent)
        beside = sorted(p.name for p in folder.glob("*.ckpt"))[:5]
        hint = f" In that folder there are: {', '.join(beside)}." if beside else ""
        raise CheckpointError(f"The checkpoint {str(path)!r} {what}.{hint}")


def _verify(path: Path) -> None:
    """Checks that the file is there and whole; torch itself does not compare the check sums."""
    _check_is_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            # What is marked as a folder (0x10) torch leaves as it finds the memory.
            damaged = damaged or next((i.filename for i in archive.infolist() if i.external_attr & 0x10), None)
    except PermissionError as error:
        raise CheckpointError(f"The checkpoint {str(path)!r} may not be read by this user.") from error
    except Exception as error:  # a damaged archive fails in many ways
        raise CheckpointError(
            f"{str(path)!r} ({path.stat().st_size} bytes) is truncated or no checkpoint at all. Take an earlier one."
        ) from error
    if damaged is not None:
        raise CheckpointError(
            f"The checkpoint {str(path)!r} is damaged: {damaged!r} in it is not what was written. Take an earlier one."
        )


def _unsafe(path: str | os.PathLike[str]) -> CheckpointError:
    with torch.serialization.safe_globals(_safe_globals()):
        unsafe = [] if _is_remote(path) else torch.serialization.get_unsafe_globals_in_checkpoint(path)
    return CheckpointError(
        f"The checkpoint {os.fspath(path)!r} holds {', '.join(unsafe) or 'objects'}, which could run code when read, so"
        " it is refused. If you trust these classes, allow them with `torch.serialization.add_safe_globals([...])`."
    )


def _safe_globals() -> list[Any]:
    """What may stand in a checkpoint beside tensors: OmegaConf's containers, if it is installed, and their parts."""
    try:
        import omegaconf
        from omegaconf import base, nodes
    except ModuleNotFoundError:
        return []
    leaves = [value for value in vars(nodes).values() if isinstance(value, type) and issubclass(value, base.Node)]
    containers = [omegaconf.DictConfig, omegaconf.ListConfig, base.ContainerMetadata, base.Metadata]
    builtin = [typing.Any, collections.defaultdict, dict, list, tuple, int, float, str, bool]
    return [*containers, *leaves, *builtin]
