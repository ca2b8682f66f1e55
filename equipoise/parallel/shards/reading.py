"""Read a sharded checkpoint: each process the parts that it needs, on any number of processes, and no pickle.

Which parts of which shards a tensor needs is the plan of torch.distributed.checkpoint. Torch's `load` is not used: its
processes exchange pickles without a signature, and each reads on its own here.
"""

import zlib
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from equipoise.errors import CheckpointError, ConfigurationError
from equipoise.interop.remote.paths import AnyPath
from equipoise.parallel.shards.index import (
    INDEX,
    REST,
    Chunk,
    Index,
    SavedTensor,
    has_only_our_names,
    is_rest,
    read_index,
)

__all__ = ["ShardReader", "folder_of_part", "has_shards", "is_sharded_checkpoint"]

# The index of a checkpoint that torch has written, which is a pickle.
_INDEX_OF_TORCH = ".metadata"

# Bytes of a piece of a shard; a multiple of the size of any element.
_PIECE = 1 << 24


def is_sharded_checkpoint(path: AnyPath) -> bool:
    """Return True if a path is a folder with the index of a sharded checkpoint."""
    return (path / INDEX).is_file()


def has_shards(folder: AnyPath) -> bool:
    """Return True if a path is a folder with shards, also if it is not complete or in torch's format."""
    # Whoever may read a file need not be allowed to list a folder; the error of reading says what else is wrong.
    with suppress(OSError, ConfigurationError):
        return folder.is_dir() and any(map(_is_sign, folder.iterdir()))
    return False


def _is_sign(file: AnyPath) -> bool:
    return file.name in (INDEX, REST, _INDEX_OF_TORCH) or file.name.endswith(".shards")


def folder_of_part(file: AnyPath) -> AnyPath | None:
    """Return the sharded checkpoint to which a file belongs; None for any other file."""
    folder = file.parent
    if is_rest(file.name) and is_sharded_checkpoint(folder) and has_only_our_names(folder):
        return folder
    return None


class ShardReader:
    """Reads tensors of a sharded checkpoint.

    Args:
        path: The folder, on this machine or elsewhere.

    Raises:
        CheckpointError: If it is not complete, of another format, or damaged.

    Attributes:
        path: The folder.
        tensors: The tensors in shards, by name.
    """

    def __init__(self, path: AnyPath) -> None:
        self.path = path
        try:
            self._index = _checked_index(self.path)
        except CheckpointError as error:
            raise CheckpointError(f"The checkpoint {str(self.path)!r} cannot be read: {error}.") from error
        self.tensors: dict[str, SavedTensor] = self._index.tensors

    @property
    def rest(self) -> AnyPath:
        """The file with all that lies in no shards, which is read as any checkpoint."""
        return self.path / self._index.rest

    def whole(self, name: str) -> Tensor:
        """Return a tensor as a whole, on the CPU.

        Args:
            name: Its name.

        Raises:
            CheckpointError: If it is damaged.
        """
        saved = self.tensor(name)
        tensor = torch.zeros(saved.shape, dtype=saved.dtype, device="cpu")
        self.fill(name, tensor)
        return tensor

    def pieces(self, name: str) -> Iterator[Tensor]:
        """Yield the values of a tensor in order, on the CPU: at most 16 MiB at a time if its shards are rows of it.

        Args:
            name: Its name.

        Raises:
            CheckpointError: If it is damaged, which the last piece of a shard shows.
        """
        saved = self.tensor(name)
        chunks = sorted(saved.chunks, key=lambda chunk: chunk.offsets)
        row = 0
        for chunk in chunks:
            if chunk.offsets[:1] != (row,) or chunk.sizes[1:] != saved.shape[1:]:
                yield self.whole(name)
                return
            row += chunk.sizes[0]
        for chunk in chunks:
            yield from self._pieces(name, saved, chunk)

    def fill(self, name: str, tensor: Tensor) -> None:
        """Read the values of a tensor that this process needs.

        Args:
            name: The name of the tensor in the checkpoint.
            tensor: A tensor of the same shape, in shards of any kind or whole.

        Raises:
            CheckpointError: If the checkpoint has no such tensor, or its shards are damaged.
        """
        saved = self.tensor(name)
        if tuple(tensor.shape) != saved.shape:
            raise self._error(f"{name!r} has the shape {saved.shape}, not {tuple(tensor.shape)}")
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({name: tensor}, Metadata({name: _metadata_of(saved)}), is_coordinator=True)
        # A plan of this process alone: nothing is exchanged.
        for item in planner.finish_plan(planner.create_local_plan()).items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._part(name, saved, item))
            planner.commit_tensor(item, target)

    def tensor(self, name: str) -> SavedTensor:
        """Return where a tensor lies.

        Args:
            name: Its name.

        Raises:
            CheckpointError: If there is none of that name.
        """
        if name not in self.tensors:
            raise self._error(f"it has no shards of {name!r}")
        return self.tensors[name]

    def _error(self, reason: str) -> CheckpointError:
        return CheckpointError(f"The checkpoint {str(self.path)!r} is damaged: {reason}. Take another one.")

    def _part(self, name: str, saved: SavedTensor, item: ReadItem) -> Tensor:
        """Return the part of a shard that is asked for."""
        chunks = {chunk.offsets: chunk for chunk in saved.chunks}
        values = self._read(name, saved, chunks[tuple(item.storage_index.offset or ())])
        # In each dimension, the indices within the shard.
        places = zip(item.storage_offsets, item.lengths, strict=True)
        return values[tuple(slice(begin, begin + length) for begin, length in places)]

    def _pieces(self, name: str, saved: SavedTensor, chunk: Chunk) -> Iterator[Tensor]:
        """Yield the values of a shard."""
        crc32 = 0
        bytes_left = saved.size_of(chunk)
        with (self.path / chunk.file).open("rb") as file:
            file.seek(chunk.begin)
            while content := bytearray(file.read(min(_PIECE, bytes_left))):
                bytes_left -= len(content)
                crc32 = zlib.crc32(content, crc32)
                yield torch.frombuffer(content, dtype=torch.uint8).view(saved.dtype)
        self._check_shard(name, chunk, bytes_left, crc32)

    def _check_shard(self, name: str, chunk: Chunk, bytes_left: int, crc32: int) -> None:
        # The disk may have changed what was written.
        if bytes_left or crc32 != chunk.crc32:
            raise self._error(f"a shard of {name!r} in {chunk.file!r} is not what was written")

    def _read(self, name: str, saved: SavedTensor, chunk: Chunk) -> Tensor:
        """Return the values of a shard."""
        content = bytearray(saved.size_of(chunk))
        with (self.path / chunk.file).open("rb") as file:
            file.seek(chunk.begin)
            count = file.readinto(content)
        self._check_shard(name, chunk, len(content) - count, zlib.crc32(content))
        data = torch.frombuffer(content, dtype=torch.uint8)
        return data.view(saved.dtype).reshape(chunk.sizes)


def _metadata_of(saved: SavedTensor) -> TensorStorageMetadata:
    """Return a tensor as torch describes it."""
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in saved.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=saved.dtype), torch.Size(saved.shape), chunks)


def _checked_index(path: AnyPath) -> Index:
    """Return the index of a folder whose files are all there."""
    # 1. The index, without which a folder is no checkpoint.
    if not (path / INDEX).is_file():
        if (path / _INDEX_OF_TORCH).exists():
            raise CheckpointError(
                "it is a folder of torch.distributed.checkpoint, whose index is a pickle and could run code. If you"
                " trust it, `torch.distributed.checkpoint.format_utils.dcp_to_torch_save` makes a file of it"
            )
        raise CheckpointError(
            f"it is a folder without {INDEX!r}, so it is no sharded checkpoint, or its writer was killed before its end"
        )
    index = read_index((path / INDEX).read_bytes())

    # 2. The files that it lists.
    for name, saved in index.files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"it lacks the file {name!r}")
        size = file.stat().st_size
        if size != saved.size:
            raise CheckpointError(f"{name!r} in it has {size} bytes, not {saved.size}")
    crc32 = zlib.crc32((path / index.rest).read_bytes())
    if crc32 != index.files[index.rest].crc32:
        raise CheckpointError(f"{index.rest!r} in it is not what was written")
    return index
