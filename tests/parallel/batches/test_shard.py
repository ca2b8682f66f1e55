"""The number of batches of one process's part of a loader."""

import math

import pytest

from equipoise.parallel.batches.shard import Shard


@pytest.mark.parametrize(
    ("shard", "count"),
    [
        (Shard("loader"), 7),
        (Shard("loader", 0, 3), 3),
        (Shard("loader", 2, 3), 2),
        (Shard("loader", 1, 3, in_turn=False), None),
    ],
    ids=["the whole loader", "in turn, the first", "in turn, the last", "batches of its own"],
)
def test_the_number_of_batches_of_a_part(shard: Shard, count: int | None) -> None:
    assert shard.num_batches(7) == count
    assert shard.num_batches(math.inf) == math.inf
