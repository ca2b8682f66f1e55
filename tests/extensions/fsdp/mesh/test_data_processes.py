"""Processes of which several compute each batch together count once for the data."""

from typing import Any

import pytest
import torch

from equipoise.extensions.fsdp.mesh.data_processes import DataProcesses
from equipoise.parallel.communication.connected_processes import ConnectedProcesses
from equipoise.parallel.communication.processes import Processes
from tests.support.process_groups import CPU, in_group


class Rows(ConnectedProcesses):
    """Of these processes, each two compute a batch together."""

    processes_per_batch = 2
    data_view = DataProcesses
    device = CPU

    def __init__(self, rank: int, world_size: int = 4) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size


def exchanged(rank: int) -> list[Any]:
    data, value = Rows(rank).data, torch.tensor((1.0, 2.0, 4.0, 8.0)[rank])
    objects = [(data.rank, data.world_size, data.is_main), data.gather_objects(rank), data.broadcast(rank, 1)]
    reduced = [float(data.reduce(value, reduce_op=name)) for name in ("sum", "mean", "min", "max")]
    return [*objects, reduced, data.reduce("text"), data.all_gather(value).tolist()]


@pytest.mark.thorough
def test_processes_that_share_a_batch_count_once() -> None:
    for rank, (place, *values) in enumerate(in_group(exchanged, processes=4)):
        assert place == (rank // 2, 2, rank == 0)
        assert values == [[0, 2], 2, [5.0, 2.5, 1.0, 8.0], "text", [1.0, 4.0]]


def test_one_row_exchanges_nothing() -> None:
    data = Rows(1, 2).data
    assert (data.rank, data.world_size) == (0, 1)
    assert data.gather_objects(3) == [3]
    assert data.broadcast(3) == data.reduce(3) == data.all_gather(3) == 3


def test_processes_with_a_batch_each_are_the_same_object() -> None:
    alone = Processes()
    assert alone.data is alone
