"""The parts of a batch on their devices, and their division into micro-batches."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from equipoise.parallel.batches.shares import even_sizes
from equipoise.parallel.batches.splitting import Splitter

__all__ = ["PlacedParts"]

# Samples of a part, the index of their device, and their number.
_Piece = tuple[Any, int, int]


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
        # 1. Split every part by itself. The first micro-batch consists of the first piece of every part, and so on.
        pieces_by_number: defaultdict[int, list[_Piece]] = defaultdict(list)
        for part, index, size in zip(self, self.indices, self.sizes, strict=True):
            sizes = [piece_size for piece_size in even_sizes(size, count) if piece_size]
            pieces = splitter.parts(part, sizes)
            for number, samples in enumerate(pieces):
                pieces_by_number[number].append((samples, index, sizes[number]))

        # 2. Put the pieces of each micro-batch together.
        micro_batches = []
        for pieces_of_batch in pieces_by_number.values():
            parts, indices, sizes_of_parts = zip(*pieces_of_batch, strict=True)
            micro_batches.append(PlacedParts.of(parts, indices, sizes_of_parts))
        return micro_batches
