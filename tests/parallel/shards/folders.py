"""Sharded checkpoints written by threads that stand for processes.

The writer is that of `fsdp`, imported on use: in a copy of the core alone, tests that write are skipped.
"""

import io
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.interop.remote.paths import AnyPath

if TYPE_CHECKING:
    from equipoise.extensions.fsdp.state.writing.pieces import Piece

__all__ = ["Exchange", "cut", "save"]


class Exchange:
    """Exchanges values between threads, one for each rank."""

    def __init__(self, count: int) -> None:
        self.values: list[Any] = [None] * count
        self._barrier = threading.Barrier(count, timeout=60)

    def of(self, rank: int) -> Callable[[Any], list[Any]]:
        def exchange(value: Any) -> list[Any]:
            self.values[rank] = value
            self._barrier.wait()
            values = list(self.values)
            self._barrier.wait()
            return values

        return exchange


def cut(tensors: dict[str, Tensor], count: int) -> list[list["Piece"]]:
    """Return the pieces of each rank: rows of each tensor, as torch shards them; some ranks have none."""
    from equipoise.extensions.fsdp.state.writing.pieces import Piece

    pieces: list[list[Piece]] = [[] for _ in range(count)]
    for name, tensor in tensors.items():
        rows = -(-len(tensor) // count)
        for rank in range(count):
            first = min(rank * rows, len(tensor))
            offsets = (first, *[0] * (tensor.ndim - 1))
            part = tensor[first : first + rows]
            pieces[rank].append(Piece(name, part, tuple(tensor.shape), offsets))
    return pieces


def save(path: AnyPath, tensors: dict[str, Tensor], rest: Any, count: int = 2) -> None:
    """Write tensors in shards, and all else, by several ranks."""
    from equipoise.extensions.fsdp.state.writing.saving import Content, save_folder

    file = io.BytesIO()
    torch.save(rest, file)
    exchange = Exchange(count)

    def write(rank: int, pieces: list["Piece"]) -> None:
        content = Content(path, pieces, file.getvalue() if rank == 0 else None)
        save_folder(content, rank, exchange.of(rank))

    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(write, *item) for item in enumerate(cut(tensors, count))]:
            future.result()
