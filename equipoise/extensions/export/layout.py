"""The format of safetensors, written piece by piece: the library's own writer needs all tensors in memory.

A file is the length of its header in eight bytes, the header as JSON, and the bytes of the tensors one after the other
(https://huggingface.co/docs/safetensors, "Format"). An index names the file of each tensor where there are several.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import Tensor

from equipoise.errors import CheckpointError

__all__ = ["CODES", "FORMAT", "INDEX_SUFFIX", "METADATA", "FileOfWeights", "converted", "index_of", "split"]

# Names of the dtypes in a header.
CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

# Without this entry transformers refuses a file.
FORMAT = {"format": "pt"}

# The entry of a header that is no tensor.
METADATA = "__metadata__"

INDEX_SUFFIX = ".safetensors.index.json"

# Elements that are converted and written at a time.
_MOST_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class FileOfWeights:
    """A file of safetensors.

    Attributes:
        tensors: A tensor for each name, with the shape and the dtype to write, and perhaps no values.
        aliases: Further names of these tensors, each with the name under which it is written.
        read: Yields the values of a tensor by its name, in order, in flat pieces.
    """

    tensors: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    read: Callable[[str], Iterable[Tensor]]

    def write(self, file: IO[bytes]) -> None:
        """Write it, with one piece of a tensor in memory at a time."""
        # Aligned to its elements, each tensor can be mapped into memory.
        names = sorted(self.tensors, key=self._size_of_element, reverse=True)
        header = self._header(names)
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for name in names:
            dtype = self.tensors[name].dtype
            for piece in self.read(name):
                for begin in range(0, len(piece), _MOST_ELEMENTS):
                    _write_bytes(file, converted(name, piece[begin : begin + _MOST_ELEMENTS], dtype))

    def _size_of_element(self, name: str) -> int:
        return self.tensors[name].dtype.itemsize

    def _header(self, names: Sequence[str]) -> bytes:
        # The metadata is that of `safetensors.torch.save_model`.
        header: dict[str, Any] = {METADATA: {**self.aliases, **FORMAT}}
        begin = 0
        for name in names:
            tensor = self.tensors[name]
            end = begin + _size_of(tensor)
            header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
            begin = end
        text = json.dumps(header, separators=(",", ":")).encode()
        # The tensors begin at a multiple of 8 bytes.
        return text.ljust(math.ceil(len(text) / 8) * 8)


def converted(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values in another dtype.

    Raises:
        CheckpointError: If one of them is too large for it.
    """
    result = values.to(dtype)
    if dtype == values.dtype:
        return result
    infinite = result.isinf()
    # Not all types of 8 bits have this operation.
    if infinite.any() and not infinite.equal(values.double().isinf()):
        raise CheckpointError(f"{name!r} has values that are too large for {dtype}. Choose a dtype of a larger range.")
    return result


def _size_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _write_bytes(file: IO[bytes], flat: Tensor) -> None:
    # A single element may have any stride, but has to have 1 for a view as bytes.
    content: Any = flat.contiguous().as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy()
    file.write(memoryview(content))


def split(
    tensors: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    read: Callable[[str], Iterable[Tensor]],
    stem: str,
    most_bytes: float,
) -> dict[str, FileOfWeights]:
    """Divide weights among files, in the order of their names.

    Args:
        tensors: A tensor for each name, with the shape and the dtype to write.
        aliases: Further names of tensors, each with the name under which it is written.
        read: Yields the values of a tensor by its name, in order, in flat pieces.
        stem: The beginning of the names of files.
        most_bytes: The largest size of a file, unless a single tensor is larger.

    Returns:
        The files by name: "STEM.safetensors", or "STEM-00001-of-00002.safetensors" and so on.
    """
    # 1. The tensors of each file.
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        size += _size_of(tensor)
        if size > most_bytes and groups[-1]:
            groups.append({})
            size = _size_of(tensor)
        groups[-1][name] = tensor

    # 2. The files; an alias stands where its tensor is.
    files = {}
    for number, group in enumerate(groups, 1):
        place = ""
        if len(groups) > 1:
            place = f"-{number:05d}-of-{len(groups):05d}"
        aliases_here = {alias: name for alias, name in aliases.items() if name in group}
        files[f"{stem}{place}.safetensors"] = FileOfWeights(group, aliases_here, read)
    return files


def index_of(files: Mapping[str, FileOfWeights]) -> bytes:
    """Return the content of the index of several files, as transformers reads it."""
    places: dict[str, str] = {}
    total = 0
    for file, part in files.items():
        for name, tensor in part.tensors.items():
            places[name] = file
            total += _size_of(tensor)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2).encode()
