"""Places for exported files: a file or a folder that is complete or absent, on this machine or elsewhere by fsspec."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from equipoise.errors import ConfigurationError
from equipoise.interop.remote.files import RemotePath
from equipoise.interop.remote.paths import to_path
from equipoise.parallel.shards.atomic_file import write_atomically
from equipoise.parallel.shards.disk_faults import is_limit, limit_error
from equipoise.parallel.shards.folder import UnfinishedFolder

__all__ = ["Write", "new_folder", "write_file", "write_folder"]

# Writes the content of a file.
Write = Callable[[IO[bytes]], Any]

# Names of files in an exported folder, which a later export may remove.
_OURS = re.compile(
    r"(model|adapter_model)(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|README\.md"
    r"|(config|generation_config|adapter_config)\.json"
)
# The file that a folder of an adapter has.
_ADAPTER = "adapter_config.json"


def write_file(out: str, write: Write, *, overwrite: bool) -> None:
    """Write a file completely or not at all.

    Args:
        out: Its path or URL.
        write: Writes its content.
        overwrite: Whether a file of that name may be replaced.

    Raises:
        ConfigurationError: If something else has that name.
        CheckpointError: If a limit of the disk is reached.
    """
    target = to_path(out)
    if isinstance(target, RemotePath):
        _write_remote(target, {target: write}, overwrite=overwrite)
        return
    if target.is_dir():
        raise ConfigurationError(f"{out!r} is a folder, but its name is that of a file.")
    if os.path.lexists(target) and not overwrite:
        raise _exists(out)
    write_atomically(target, write)


def write_folder(out: str, files: Mapping[str, Write], *, overwrite: bool) -> None:
    """Write a folder completely or not at all.

    Args:
        out: Its path or URL.
        files: By the names of its files, what writes them.
        overwrite: Whether an exported folder of that name may be replaced; not elsewhere than on this machine.

    Raises:
        ConfigurationError: See `new_folder`.
        CheckpointError: See `new_folder`.
    """
    target = to_path(out)
    if isinstance(target, RemotePath):
        _write_remote(target, {target / name: write for name, write in files.items()}, overwrite=False)
        return
    with new_folder(out, overwrite=overwrite) as folder:
        for name, write in files.items():
            path = folder / name
            with path.open("wb") as file:
                write(file)
                # The content must be on the disk before the name of the folder is.
                file.flush()
                os.fsync(file.fileno())


@contextmanager
def new_folder(out: str, *, overwrite: bool) -> Iterator[Path]:
    """Yield a folder that gets its name at the end of the `with` block, and is removed after an error.

    Args:
        out: Its path.
        overwrite: Whether an exported folder of that name may be replaced.

    Raises:
        ConfigurationError: If something else has that name.
        CheckpointError: If a limit of the disk is reached.
    """

    def check(target: Path) -> None:
        _check_replaceable(target, overwrite=overwrite)

    target = Path(to_path(out))
    unfinished = UnfinishedFolder(target, check)
    try:
        yield unfinished.path
        unfinished.publish()
    except BaseException as error:
        written = sum(file.stat().st_size for file in unfinished.path.rglob("*"))
        unfinished.discard()
        if isinstance(error, OSError) and is_limit(error):
            raise limit_error(target, error, written) from error
        raise


def _check_replaceable(target: Path, *, overwrite: bool) -> None:
    """Check that a folder may be written: nothing is there, or nothing but an earlier export."""
    if not os.path.lexists(target):
        return
    if not target.is_dir() or target.is_symlink():
        raise ConfigurationError(f"{str(target)!r} is no folder. A file of weights has a name with '.safetensors'.")
    if os.listdir(target) and not overwrite:
        raise _exists(str(target))
    foreign = next(_foreign_in(target), None)
    if foreign is not None:
        raise ConfigurationError(
            f"{str(target)!r} is not replaced, as it holds {foreign!r}, which no export has written. Choose another"
            " name, or remove the folder."
        )


def _foreign_in(folder: Path) -> Iterator[str]:
    """Yield the names of what no export has written. It may have written a folder for each further adapter of peft."""
    for path in sorted(folder.iterdir()):
        if (path / _ADAPTER).is_file() and not path.is_symlink():
            yield from _foreign_in(path)
        elif not _OURS.fullmatch(path.name):
            yield path.name


def _exists(out: str) -> ConfigurationError:
    return ConfigurationError(f"{out!r} exists already. Replace it by overwrite=True (--overwrite), or choose another.")


def _write_remote(out: RemotePath, files: Mapping[RemotePath, Write], *, overwrite: bool) -> None:
    """Write files of another file system, which get their names when all are complete."""
    if out.exists() and not overwrite:
        raise ConfigurationError(f"{str(out)!r} exists already. Choose another name.")
    # After an error no file gets its name.
    filesystem = out.filesystem
    with filesystem.transaction:
        for path, write in files.items():
            with filesystem.open(os.fspath(path), "wb") as file:
                write(file)
