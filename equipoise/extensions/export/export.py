"""`export_weights`: the weights of a checkpoint or a module as safetensors."""

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.errors import ConfigurationError
from equipoise.extensions.export.layout import INDEX_SUFFIX, FileOfWeights, index_of, split
from equipoise.extensions.export.places import Write, new_folder, write_file, write_folder
from equipoise.extensions.export.pretrained import has_own_layout, save_pretrained
from equipoise.extensions.export.weights import Source, Weights, open_weights
from equipoise.interop.remote.paths import is_remote
from equipoise.validation import is_whole

__all__ = ["DTYPES", "Export", "export_weights"]

DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Names of the dtypes in which floating-point weights can be written."""

# A size with its unit, as transformers takes it.
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *(|KB|MB|GB|TB)")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

_STEM = "model"
_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Export:
    """Result of an export.

    Attributes:
        files: The paths or URLs of the files.
        left_out: Names of weights outside of the chosen part.
    """

    files: tuple[str, ...]
    left_out: tuple[str, ...] = ()


def export_weights(
    source: Source,
    out: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    prefix: str = "",
    weights: str | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
) -> Export:
    """Write weights as safetensors, which transformers and other programs read.

    A checkpoint is read as data: nothing in it is run. It is read and written in pieces of a tensor, so a file of any
    size needs little memory. After Ctrl-C or an error nothing is left, and what was there
    before is unchanged.

    Of tied weights the first name is written; the others stand in the metadata of the file, where `read_weights` and
    `safetensors.torch.load_model` find them. Names are those without `torch.compile`.

    A module with a method `save_pretrained`, such as a model of transformers or peft, is written to a folder by that
    method, so that `from_pretrained` reads it: configuration and weights, or the configuration and the weights of
    adapters.

    Args:
        source: What is exported: the path or URL of a checkpoint of Equipoise or Lightning, the folder of a sharded
            one, a module, or tensors by name.
        out: A file that ends with ".safetensors", or a folder: for "model.safetensors", or for several files with
            "model.safetensors.index.json". A URL of fsspec, such as "s3://bucket/model.safetensors", is one, too.
        dtype: The type of floating-point weights in the file, one of `DTYPES` by its name or as a dtype of torch.
            Default: None, as they are.
        prefix: The part of the module that is exported, such as "model" for `self.model`; names begin below it.
            Default: all.
        weights: Of a checkpoint of `WeightAveraging`, "averaged" or "trained": those that training continues with.
            Default: None, averaged ones where there are some.
        max_shard_size: Bytes, or a text such as "500MB", above which a folder gets several files. Default: "5GB".
        overwrite: Replace a file, or a folder with nothing but an earlier export. Default: False.

    Returns:
        The files, and the names that were left out by `prefix`.

    Raises:
        CheckpointError: If the checkpoint is missing or damaged, a value is no plain tensor, such as a quantised or
            sparse one, or the disk is full.
        ConfigurationError: If an argument is wrong, or `out` exists.

    Example:
        >>> export_weights("last.ckpt", "exported", prefix="model", dtype="bfloat16").files  # doctest: +SKIP
        ('exported/model.safetensors',)
    """
    # 1. The arguments.
    target = os.fspath(out)
    chosen_dtype = _dtype(dtype)
    most_bytes = _bytes(max_shard_size)
    if weights is not None and not isinstance(source, str | os.PathLike):
        raise ConfigurationError(f"weights={weights!r} chooses among those of a checkpoint; a module has no others.")

    # 2. A module, or a part of it.
    is_file = target.endswith(_SUFFIX)
    if isinstance(source, nn.Module) and prefix:
        source = _submodule(source, prefix)
        prefix = ""
    if isinstance(source, nn.Module) and has_own_layout(source) and not is_file:
        return _export_by_its_method(source, target, chosen_dtype, most_bytes, overwrite=overwrite)

    # 3. Weights by name.
    with open_weights(source, prefix=prefix, choice=weights) as opened:
        tensors = _described(opened, chosen_dtype)
        if is_file:
            file = FileOfWeights(tensors, opened.aliases, opened.pieces)
            write_file(target, file.write, overwrite=overwrite)
            return Export((target,), opened.left_out)
        files = split(tensors, opened.aliases, opened.pieces, _STEM, most_bytes)
        return Export(_paths(target, _write_folder(target, files, overwrite=overwrite)), opened.left_out)


def _write_folder(out: str, files: Mapping[str, FileOfWeights], *, overwrite: bool) -> list[str]:
    """Write files, and their index if there are several; return their names."""
    writers: dict[str, Write] = {}
    for name, file in files.items():
        writers[name] = file.write
    if len(files) > 1:
        index = index_of(files)
        writers[f"{_STEM}{INDEX_SUFFIX}"] = lambda target: target.write(index)
    write_folder(out, writers, overwrite=overwrite)
    return list(writers)


def _paths(folder: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{folder.rstrip('/')}/{name}" for name in names)


def _export_by_its_method(
    module: nn.Module, out: str, dtype: torch.dtype | None, most_bytes: int, *, overwrite: bool
) -> Export:
    if is_remote(out):
        raise ConfigurationError(
            f"{type(module).__name__}.save_pretrained writes to this machine alone, and not to {out!r}. Choose a local"
            " folder, or a file that ends with '.safetensors'."
        )
    with new_folder(out, overwrite=overwrite) as folder:
        save_pretrained(module, folder, dtype, most_bytes)
        files = [path for path in folder.rglob("*") if path.is_file()]
        names = [file.relative_to(folder).as_posix() for file in files]
    return Export(_paths(out, sorted(names)))


def _submodule(module: nn.Module, prefix: str) -> nn.Module:
    try:
        return module.get_submodule(prefix.rstrip("."))
    except AttributeError as error:
        raise ConfigurationError(f"There is no part {prefix!r}: {error}.") from error


def _described(weights: Weights, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return tensors without values, of the shapes and dtypes to write, by the names to write."""
    described = {}
    for name in weights.kept_names:
        tensor = weights.tensors[name]
        written_dtype = tensor.dtype
        if dtype is not None and tensor.is_floating_point():
            written_dtype = dtype
        described[name] = torch.empty(tensor.shape, dtype=written_dtype, device="meta")
    return described


def _dtype(value: str | torch.dtype | None) -> torch.dtype | None:
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigurationError(f"dtype must be one of {', '.join(DTYPES)}, or None, not {value!r}.")
    chosen: torch.dtype = getattr(torch, name)
    return chosen


def _bytes(size: int | str) -> int:
    if is_whole(size, least=1):
        return int(size)
    match = _SIZE.fullmatch(str(size).strip())
    if match is None or float(match[1]) == 0:
        raise ConfigurationError(f"max_shard_size must be bytes or a text such as '500MB' or '5GB', not {size!r}.")
    return math.ceil(float(match[1]) * _UNITS[match[2]])
