"""The index of a sharded checkpoint: which files it has, and where in them the shards of each tensor lie.

It is a file of JSON and stands for the whole checkpoint: it is written last, after all others are complete. It
takes the place of torch's own `.metadata`, a pickle, which torch's reader would run. Where folders cannot be renamed,
the names of files hold a token of their save: the index alone tells which of them belong to the checkpoint.

    {"crc32": 1234, "content": {"format": ..., "files": {NAME: {...}}, "tensors": {NAME: {...}}}}

Whatever is read from it is checked before it is used, as anyone may have written it.
"""

import json
import math
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from equipoise.errors import CheckpointError
from equipoise.interop.remote.paths import AnyPath
from equipoise.validation import is_whole

__all__ = [
    "INDEX",
    "REST",
    "Chunk",
    "Index",
    "SavedFile",
    "SavedTensor",
    "can_be_saved",
    "file_of_rank",
    "has_only_our_names",
    "is_our_name",
    "is_rest",
    "read_index",
    "rest_file",
    "write_index",
]

# Names of the index and of the file with all that lies in no shards. A search for "*.ckpt" must not find the latter.
INDEX = "index.json"
REST = "rest.pt"

_FORMAT = "shards of equipoise"
_VERSION = 1
_TOKEN = "(-[0-9a-f]{8})?"
_FILE_NAME = re.compile(rf"rank-\d{{5,}}{_TOKEN}\.shards|rest{_TOKEN}\.pt")

# Types of elements whose bytes are the values. Quantised tensors have scales beside them.
_DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
}
# Integers of torch have 64 bits, and tensors so many dimensions, if they are copied.
_LARGEST = 2**63
_MOST_DIMENSIONS = 64


def file_of_rank(rank: int, token: str = "") -> str:
    """Return the name of the file that a process writes.

    Args:
        rank: The number of the process.
        token: Text that tells the save from others into the same folder. Default: empty, the folder is its own.
    """
    return f"rank-{rank:05d}{token}.shards"


def rest_file(token: str = "") -> str:
    """Return the name of the file with all that lies in no shards; see `file_of_rank`."""
    return REST.replace(".", f"{token}.")


def is_rest(name: str) -> bool:
    """Return True if a file has a name that `rest_file` returns."""
    return name.endswith(".pt") and is_our_name(name)


def is_our_name(name: str) -> bool:
    """Return True if a file has a name of one in a sharded checkpoint."""
    return name == INDEX or _FILE_NAME.fullmatch(name) is not None


def has_only_our_names(folder: AnyPath) -> bool:
    """Return True if all visible files of a folder have names of a sharded checkpoint."""
    return all(is_our_name(file.name) for file in folder.iterdir() if not file.name.startswith("."))


def can_be_saved(tensor: torch.Tensor) -> bool:
    """Return True if the bytes of a tensor are its values, so that it can be saved in shards."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_plain and tensor.layout is torch.strided and tensor.dtype in _DTYPES.values()


@dataclass(frozen=True)
class SavedFile:
    """A file of a checkpoint.

    Attributes:
        size: Its size in bytes.
        crc32: The check sum of its content; 0 for files of shards, in which each shard has one.
    """

    size: int
    crc32: int = 0


@dataclass(frozen=True)
class Chunk:
    """A shard of a tensor.

    Attributes:
        file: Name of its file.
        begin: Its first byte there.
        offsets: Its first index in each dimension of the tensor.
        sizes: Its shape.
        crc32: The check sum of its bytes.
    """

    file: str
    begin: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    crc32: int


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in shards.

    Attributes:
        dtype: Its type of element.
        shape: The shape of the whole.
        chunks: Its shards, which cover it. One without elements has none.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk] = field(default_factory=list)

    def size_of(self, chunk: Chunk) -> int:
        """Return the number of bytes of a shard."""
        return math.prod(chunk.sizes) * self.dtype.itemsize


@dataclass(frozen=True)
class Index:
    """Files and tensors of a checkpoint.

    Attributes:
        files: The files beside the index, by name.
        tensors: The tensors, by name.
    """

    files: dict[str, SavedFile] = field(default_factory=dict)
    tensors: dict[str, SavedTensor] = field(default_factory=dict)

    @property
    def rest(self) -> str:
        """The name of the file with all that lies in no shards."""
        return next(filter(is_rest, self.files))


# Writing


def write_index(index: Index) -> bytes:
    """Return the content of the file.

    Args:
        index: The files and tensors of the checkpoint.
    """
    files = {name: {"size": file.size, "crc32": file.crc32} for name, file in index.files.items()}
    tensors = {name: _describe(tensor) for name, tensor in index.tensors.items()}
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "byte_order": sys.byteorder,
        "files": files,
        "tensors": tensors,
    }
    return json.dumps({"crc32": _check_sum(content), "content": content}).encode()


def _describe(tensor: SavedTensor) -> dict[str, Any]:
    chunks = [vars(chunk) for chunk in tensor.chunks]
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": tensor.shape, "chunks": chunks}


def _check_sum(content: Any) -> int:
    """Return the check sum of plain data, which does not depend on the order of keys."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


# Reading


def read_index(data: bytes) -> Index:
    """Return the index that a file describes.

    Args:
        data: The content of the file.

    Raises:
        CheckpointError: If it is damaged, or does not describe a complete checkpoint.
    """
    # 1. The content, as it was written.
    try:
        outer = json.loads(data)
        content = _entry(outer, "content", dict)
        check_sum = _check_sum(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError("its index is damaged: it is no JSON, or nested too deeply") from error
    format_name = _entry(content, "format", str)
    if format_name != _FORMAT:
        raise CheckpointError(f"its index is of another format, {format_name!r:.60}")
    version = _entry(content, "version", int)
    if version != _VERSION:
        raise CheckpointError(f"its index has the version {version!r:.20}, but {_VERSION} is known here")
    if outer.get("crc32") != check_sum:
        raise CheckpointError("its index is not what was written")
    if content.get("byte_order") != sys.byteorder:
        raise CheckpointError("it was written on a machine with another order of bytes")

    # 2. Its entries.
    files = {}
    for name, entry in _entry(content, "files", dict).items():
        # A path would lead out of the folder.
        if not _FILE_NAME.fullmatch(name):
            raise CheckpointError(f"its index names a file {name!r:.60}")
        files[name] = SavedFile(_count(entry, "size"), _count(entry, "crc32"))
    if sum(map(is_rest, files)) != 1:
        raise CheckpointError(f"its index lacks {REST!r}, or has several")
    tensors = {name: _read_tensor(entry, name) for name, entry in _entry(content, "tensors", dict).items()}
    index = Index(files, tensors)

    # 3. All together.
    _check_places(index)
    return index


def _read_tensor(entry: Any, name: str) -> SavedTensor:
    """Return a tensor of the index, whose shards together have as many elements as it has."""
    dtype = _DTYPES.get(_entry(entry, "dtype", str))
    if dtype is None:
        raise CheckpointError(f"its index names a dtype {entry['dtype']!r:.60}")
    tensor = SavedTensor(dtype, _counts(entry, "shape"))
    # Also of an empty tensor torch multiplies the lengths.
    elements = math.prod(max(length, 1) for length in tensor.shape)
    if elements * dtype.itemsize >= _LARGEST or len(tensor.shape) > _MOST_DIMENSIONS:
        raise CheckpointError(f"its index has a shape of {name!r:.60} that no tensor has")
    for chunk_entry in _entry(entry, "chunks", list):
        chunk = _read_chunk(chunk_entry)
        tensor.chunks.append(chunk)
        if not _lies_within(chunk, tensor.shape):
            raise CheckpointError(f"its index has a shard of {name!r:.60} that lies outside of the tensor")
    total = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
    places = {chunk.offsets for chunk in tensor.chunks}
    if total != math.prod(tensor.shape) or len(places) < len(tensor.chunks):
        raise CheckpointError(f"its index lacks shards of {name!r:.60}, or has some of them twice")
    return tensor


def _read_chunk(entry: Any) -> Chunk:
    return Chunk(
        file=_entry(entry, "file", str),
        begin=_count(entry, "begin"),
        offsets=_counts(entry, "offsets"),
        sizes=_counts(entry, "sizes"),
        crc32=_count(entry, "crc32"),
    )


def _lies_within(chunk: Chunk, shape: tuple[int, ...]) -> bool:
    if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
        return False
    bounds = zip(chunk.offsets, chunk.sizes, shape, strict=True)
    return all(offset + size <= length for offset, size, length in bounds)


def _check_places(index: Index) -> None:
    """Check that shards lie within their files, one behind the other."""
    ranges = defaultdict(list)
    for tensor in index.tensors.values():
        for chunk in tensor.chunks:
            if chunk.file not in index.files:
                raise CheckpointError(f"its index names a file {chunk.file!r:.60} that it does not list")
            ranges[chunk.file].append((chunk.begin, chunk.begin + tensor.size_of(chunk)))
    for file, ranges_of_file in ranges.items():
        end_before = 0
        for begin, end in sorted(ranges_of_file):
            # Otherwise a small file could describe any amount of memory.
            if begin < end_before or end > index.files[file].size:
                raise CheckpointError(f"its index has shards in {file!r} that overlap, or lie outside of it")
            end_before = end


def _entry(value: Any, name: str, kind: type[Any]) -> Any:
    """Return an entry of a dictionary, of the expected type."""
    entry = value.get(name) if isinstance(value, Mapping) else None
    if type(entry) is not kind:
        raise CheckpointError(f"its index is damaged: {name!r} is missing, or of another type")
    return entry


def _count(value: Any, name: str) -> int:
    """Return a whole number from 0 that is an entry of a dictionary."""
    number: int = _entry(value, name, int)
    if not 0 <= number < _LARGEST:
        raise CheckpointError(f"its index is damaged: {name!r} is {number}")
    return number


def _counts(value: Any, name: str) -> tuple[int, ...]:
    """Return a list of such numbers that is an entry of a dictionary."""
    numbers = _entry(value, name, list)
    for number in numbers:
        if not is_whole(number, least=0) or number >= _LARGEST:
            raise CheckpointError(f"its index is damaged: {name!r} has an entry that is no count")
    return tuple(numbers)
