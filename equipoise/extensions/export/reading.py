"""Read weights from files of safetensors, under all of their names."""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import ModuleType

from torch import Tensor

from equipoise.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError
from equipoise.extensions.export.layout import FORMAT, INDEX_SUFFIX
from equipoise.interop.remote.paths import to_path

__all__ = ["read_weights"]

# How names of files in a folder begin: a model, or adapters of peft.
_STEMS = ("model", "adapter_model")


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the weights in a file or folder of safetensors, as a module loads them.

    Nothing in the files is run. Tied weights come back under all of their names, as one tensor; for files of
    `safetensors.torch.save_model`, too.

    Args:
        path: A file, or a folder with "model.safetensors" or "adapter_model.safetensors", or with several files and
            their index; a URL of fsspec, too.

    Returns:
        The tensors by name, on the CPU. Values of a local file are read when they are first used: leave it until then.

    Raises:
        CheckpointError: If there is no such file, or it is damaged.
        ConfigurationError: If the package safetensors is missing.

    Example:
        >>> module.load_state_dict(read_weights("model.safetensors"))  # doctest: +SKIP
        <All keys matched successfully>
    """
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    with _local(os.fspath(path)) as local:
        files, places = _files(local)
        for file in files:
            metadata |= _read_file(file, tensors, places)
    lacking = places.keys() - tensors.keys()
    if lacking:
        raise CheckpointError(f"The index in {os.fspath(path)!r} names {min(lacking)!r}, which its file lacks.")
    for alias, name in metadata.items():
        # Metadata may say anything else as well.
        if name in tensors and alias not in FORMAT:
            tensors.setdefault(alias, tensors[name])
    return tensors


@contextmanager
def _local(path: str) -> Iterator[Path]:
    """Yield a path on this machine; files elsewhere are copied for the `with` block."""
    place = to_path(path)
    if isinstance(place, Path):
        yield place
        return
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder)
        try:
            filesystem = place.filesystem
            is_file = filesystem.isfile(path)
            urls = [path] if is_file else filesystem.ls(path, detail=False)
            for url in urls:
                filesystem.get_file(url, str(local / PurePosixPath(url).name))
        except (ImportError, ValueError, OSError) as error:
            raise CheckpointNotFoundError(f"{path!r} cannot be read: {type(error).__name__}: {error}.") from error
        yield local / PurePosixPath(path).name if is_file else local


def _read_file(file: Path, tensors: dict[str, Tensor], places: Mapping[str, str]) -> dict[str, str]:
    """Add the tensors of a file, but those that an index has in another; return its metadata."""
    library = _library()
    try:
        with library.safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118 - it is no mapping
                if places.get(name, file.name) == file.name:
                    tensors[name] = content.get_tensor(name)
            return content.metadata() or {}
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"The file {str(file)!r} does not exist.") from error
    except (library.SafetensorError, OSError) as error:
        raise CheckpointError(f"{str(file)!r} cannot be read as safetensors: {error}.") from error


def _library() -> ModuleType:
    try:
        import safetensors
    except ImportError as error:
        raise ConfigurationError(
            f"Reading safetensors needs a package: pip install 'equipoise[export]' ({error})."
        ) from error
    return safetensors


def _files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files at a path, itself or those of a folder; and by the names of tensors those that an index says."""
    if not path.is_dir():
        return [path], {}
    for stem in _STEMS:
        file = path / f"{stem}.safetensors"
        if file.is_file():
            return [file], {}
    index = path / f"model{INDEX_SUFFIX}"
    if not index.is_file():
        raise CheckpointNotFoundError(f"The folder {str(path)!r} holds no 'model.safetensors', and no index of it.")
    try:
        places = dict(json.loads(index.read_bytes())["weight_map"].items())
        names = sorted(set(places.values()))
        # A path would lead out of the folder.
        is_safe = all(name == Path(name).name and name.endswith(".safetensors") for name in names)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{str(index)!r} is no index of weights: {type(error).__name__}: {error}.") from error
    if not is_safe:
        raise CheckpointError(f"{str(index)!r} names files outside of its folder, or of another format.")
    return [path / name for name in names], places
