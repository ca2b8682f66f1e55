"""One process's part of a loader, and the number of its batches."""

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["Shard", "count_of_rank"]


@dataclass(frozen=True)
class Shard:
    """The part of a loader that one process reads.

    Attributes:
        loader: The part.
        rank: Number of the process. Default: 0.
        num_shards: Number of parts. Default: 1, the whole loader.
        in_turn: True if the batches of the loader are dealt to the processes in turn. False: the part has batches of
            its own. Default: True.

    Example:
        >>> Shard([0, 2, 4], rank=0, num_shards=2).num_batches(5)
        3
    """

    loader: Any
    rank: int = 0
    num_shards: int = 1
    in_turn: bool = True

    def num_batches(self, total: float) -> float | None:
        """Return the number of batches that this process evaluates.

        Args:
            total: The number that all processes together evaluate; infinite if unknown.

        Returns:
            The number; None where the part has batches of its own, which may be counted.
        """
        if self.num_shards == 1 or math.isinf(total):
            return total
        if self.in_turn:
            return count_of_rank(int(total), self.rank, self.num_shards)
        return None


def count_of_rank(count: int, rank: int, num_shards: int) -> int:
    """Return how many of `count` items a process receives, if they are dealt in turn.

    Example:
        >>> [count_of_rank(5, rank, 2) for rank in range(2)]
        [3, 2]
    """
    return len(range(rank, count, num_shards))
