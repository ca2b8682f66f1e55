"""The number of batches of one process's part of a loader."""

import math

import pytest

from equipoise.parallel.batches.shard import Shard


def test_the_whole_loader() -> None:
    shard = Shard("loader")
    assert shard.num_batches(7) == 7
    assert shard.num_batches(math.inf) == math.inf


@pytest.mark.parametrize(("rank", "count"), [(0, 3), (1, 2), (2, 2)])
def test_batches_in_turn(rank: int, count: int) -> None:
    shard = Shard("loader", rank, 3)
    assert shard.num_batches(7) == count
    assert shard.num_batches(math.inf) == math.inf


def test_batches_of_its_own() -> None:
    shard = Shard("loader", 1, 3, in_turn=False)
    assert shard.num_batches(7) is None
    assert shard.num_batches(math.inf) == math.inf
