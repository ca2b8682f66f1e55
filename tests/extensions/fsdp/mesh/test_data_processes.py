"""Processes of which several compute each batch together count once for the data."""

from typing import Any

import pytest
import torch

from equipoise.extensions.fsdp.mesh.data_processes import DataProcesses
from equipoise.parallel.communication.processes import Processes


class Four(Processes):
    """One of four processes, of which two compute each batch; the others have the values that the test states."""

    world_size = 4
    processes_per_batch = 2
    data_view = DataProcesses

    def __init__(self, rank: int, values: list[Any]) -> None:
        self.rank = rank
        self._values = values

    def gather_objects(self, value: Any) -> list[Any]:
        assert value == self._values[self.rank]
        return self._values

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        """Count what the others add, of which only the first of each row add their value."""
        values = torch.stack(self._values)
        if reduce_op == "sum":
            mine = self._values[self.rank] * (self.rank % 2 == 0)
            assert torch.equal(tensor, mine)
            return values[::2].sum()
        return getattr(values, reduce_op)()

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        return torch.stack(self._values)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        return self._values[src]


@pytest.mark.parametrize("rank", range(4))
def test_processes_that_share_a_batch_count_once(rank: int) -> None:
    data = Four(rank, ["a", "a'", "b", "b'"]).data
    assert (data.rank, data.world_size, data.is_main) == (rank // 2, 2, rank == 0)
    assert data.gather_objects(["a", "a'", "b", "b'"][rank]) == ["a", "b"]
    assert data.broadcast(None, 1) == "b"


@pytest.mark.parametrize("rank", range(4))
def test_reductions_count_each_batch_once(rank: int) -> None:
    values = [torch.tensor(value) for value in (1.0, 1.0, 4.0, 4.0)]
    data = Four(rank, values).data
    results = [float(data.reduce(values[rank], reduce_op=name)) for name in ("sum", "mean", "min", "max")]
    assert results == [5.0, 2.5, 1.0, 4.0]
    assert data.reduce("text") == "text"
    assert torch.equal(data.all_gather(values[rank]), torch.tensor([1.0, 4.0]))


def test_one_row_exchanges_nothing() -> None:
    class Two(Four):
        world_size = 2

    data = Two(1, []).data
    assert (data.rank, data.world_size) == (0, 1)
    assert data.gather_objects(3) == [3]
    assert data.broadcast(3) == data.reduce(3) == data.all_gather(3) == 3


def test_processes_with_a_batch_each_are_the_same_object() -> None:
    alone = Processes()
    assert alone.data is alone
    assert not isinstance(alone.data, DataProcesses)
