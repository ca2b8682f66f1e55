"""Pieces of tensors in shards, which one process saves to a file of bytes."""

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor, Replicate

from equipoise.errors import CheckpointError
from equipoise.interop.remote.paths import AnyPath
from equipoise.parallel.shards.index import Chunk, SavedTensor, can_be_saved

__all__ = ["HostCopies", "Piece", "pieces_of", "write_pieces"]

# Bytes whose check sum is computed, and which are written, in one call.
_CHUNK = 1 << 24


class Piece(NamedTuple):
    """The shard of a tensor that this process saves.

    Attributes:
        name: Name of the tensor.
        tensor: The values.
        shape: The shape of the whole.
        offsets: First index of the shard in each dimension.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


def pieces_of(tensors: Mapping[str, DTensor]) -> list[Piece]:
    """Return what this process saves of tensors in shards, by the plan of torch.distributed.checkpoint.

    Of shards that several processes have alike, the first saves them.

    Args:
        tensors: The tensors, by name. The pieces share their memory.

    Raises:
        CheckpointError: If the values of a tensor are more than its bytes.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    # The plan of this process alone: nothing is exchanged.
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    plan = planner.create_local_plan()
    pieces = []
    for item in plan.items:
        name = item.index.fqn
        data = item.tensor_data
        assert data is not None
        if _is_saved_by_another(tensors[name]):
            continue
        values = planner.resolve_data(item)
        assert isinstance(values, Tensor)
        if not can_be_saved(values):
            raise CheckpointError(
                f"{name!r} cannot be saved in shards: it is a {type(values).__name__} of {values.dtype}. Choose"
                " FSDPStrategy(checkpoints='full')."
            )
        shape = tuple(data.size)
        pieces.append(Piece(name, values.detach(), shape, tuple(data.chunk.offsets)))
    return pieces


def _is_saved_by_another(tensor: DTensor) -> bool:
    """Return True if another process has the same shard and comes before this one."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return True
    places = zip(tensor.placements, coordinate, strict=True)
    return any(isinstance(placement, Replicate) and index > 0 for placement, index in places)


class HostCopies:
    """Copies of pieces in the memory of the host, which is used again for the next copies."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, pieces: list[Piece]) -> list[Piece]:
        """Return pieces with the same values, which do not change when the tensors do.

        Args:
            pieces: The pieces, on any device. Earlier copies lose their values.
        """
        buffers = {}
        copies = []
        for piece in pieces:
            buffer = self._buffers.get(piece.name)
            values = piece.tensor
            # A state of the optimiser may have changed its dtype since then.
            if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
                buffer = torch.empty(values.shape, dtype=values.dtype, device="cpu")
            buffer.copy_(values)
            buffers[piece.name] = buffer
            copies.append(piece._replace(tensor=buffer))
        self._buffers = buffers
        return copies


def write_pieces(path: AnyPath, pieces: list[Piece]) -> dict[str, SavedTensor]:
    """Write the pieces of this process to a file, one behind the other.

    Args:
        path: The file.
        pieces: The pieces, on any device.

    Returns:
        The tensors, each with the place of this process's shard.
    """
    tensors = {}
    begin = 0
    with path.open("wb") as file:
        for piece in pieces:
            values = piece.tensor.detach().cpu().contiguous()
            saved = SavedTensor(values.dtype, piece.shape)
            tensors[piece.name] = saved
            # With few rows, some processes have none.
            if values.numel():
                crc32 = _write(file, values)
                saved.chunks.append(Chunk(path.name, begin, piece.offsets, tuple(values.shape), crc32))
                begin += values.nbytes
        if isinstance(path, Path):
            file.flush()
            os.fsync(file.fileno())
    return tensors


def _write(file: IO[bytes], values: Tensor) -> int:
    """Write the bytes of a tensor, and return their check sum."""
    content: Any = values.reshape(-1).view(torch.uint8).numpy()
    data = memoryview(content)
    crc32 = 0
    for begin in range(0, len(data), _CHUNK):
        part = data[begin : begin + _CHUNK]
        crc32 = zlib.crc32(part, crc32)
        file.write(part)
    return crc32
