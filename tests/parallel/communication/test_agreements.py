"""The batch after which all processes end, where steps take long and where a signal reaches one process only."""

from collections.abc import Callable

import pytest
import torch
from torch.distributed import HashStore

from equipoise.parallel.communication import agreements, process_group

CPU = torch.device("cpu")


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Two processes that meet in one store, and a clock that the test moves on."""
    store = HashStore()
    clock = [0.0]

    def move_on(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(process_group, "group_store", lambda: store)
    monkeypatch.setattr(agreements.time, "monotonic", lambda: clock[0])
    return move_on


def ends(rank: int, batch: int, window: int = 1) -> bool:
    return agreements.agree_to_end(rank, 2, CPU, batch, window)


@pytest.mark.parametrize("window", [1, 4])
def test_processes_end_together_though_every_batch_takes_longer_than_a_signal(
    wait: Callable[[float], None], window: int
) -> None:
    assert not ends(0, 5, window)  # the other has left no note yet
    assert not ends(1, 5, window)
    wait(20.0)
    for batch in range(6, 6 + 2 * window):
        assert not ends(1, batch, window)  # it is a moment ahead of the first
        assert not ends(0, batch, window)
        wait(20.0)
    assert ends(1, 6 + 2 * window, window)
    assert ends(0, 6 + 2 * window, window)


def test_a_process_that_alone_was_signalled_ends_by_itself(wait: Callable[[float], None]) -> None:
    for batch in range(5, 100):
        assert not ends(1, batch)  # quick batches, within the time that signals take
    wait(20.0)
    assert ends(1, 100)
