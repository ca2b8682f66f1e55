"""The parts of a batch on their devices, and their division into micro-batches."""

from collections.abc import Sequence
from typing import Any

from equipoise.parallel.batches.shares import even_sizes
from equipoise.parallel.batches.splitting import Splitter

__all__ = ["PlacedParts"]


class PlacedParts(tuple[Any, ...]):
    """The parts of a batch, in the order of the data.

    Attributes:
        indices: Index of the device of each part.
        sizes: Number of samples of each part.
    """

    indices: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, parts: Sequence[Any], indices: Sequence[int], sizes: Sequence[int]) -> "PlacedParts":
        """Return the parts with their devices and sizes."""
        placed = cls(parts)
        placed.indices = tuple(indices)
        placed.sizes = tuple(sizes)
        return placed

    def split(self, count: int, splitter: Splitter) -> list["PlacedParts"]:
        """Split the part of each device, and return micro-batches of one piece of each.

        Args:
            count: Number of micro-batches, at most as many as the largest part has samples. The last ones lack parts of
                few samples.
            splitter: The splitter of batches.
        """
        # 1. Split every part by itself, with the device and the size of each piece.
        pieces_by_part: list[list[tuple[Any, int, int]]] = []
        for part, index, size in zip(self, self.indices, self.sizes, strict=True):
            sizes = [piece_size for piece_size in even_sizes(size, count) if piece_size]
            samples = splitter.parts(part, sizes)
            pieces = [(piece, index, piece_size) for piece, piece_size in zip(samples, sizes, strict=True)]
            pieces_by_part.append(pieces)

        # 2. The first micro-batch consists of the first piece of every part, and so on.
        micro_batches = []
        for number in range(max(map(len, pieces_by_part))):
            pieces = [pieces[number] for pieces in pieces_by_part if number < len(pieces)]
            parts, indices, sizes_of_parts = zip(*pieces, strict=True)
            micro_batches.append(PlacedParts.of(parts, indices, sizes_of_parts))
        return micro_batches
