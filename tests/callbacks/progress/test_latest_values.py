"""Values of a device are shown without waiting for it."""

import pytest
import torch
from torch import Tensor

from equipoise.callbacks.progress.latest_values import LatestValues


class Remote(Tensor):
    """A CPU tensor that says it lies on a CUDA device."""

    is_cuda = True


class Queue:
    """A device's queue: events come to pass when the test says so."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(self, device: torch.device) -> "Event":
        self.events.append(Event())
        return self.events[-1]


class Event:
    """One mark in the queue."""

    def __init__(self) -> None:
        self.passed = False
        self.waited = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.waited = self.passed = True


def remote(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(value, dtype=dtype).as_subclass(Remote)


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.fixture
def values(queue: Queue) -> LatestValues:
    return LatestValues(record_event=queue.record, pin_memory=False)


def test_values_on_the_host_are_read_at_once(values: LatestValues, queue: Queue):
    given = {"loss": torch.tensor([0.5]), "count": torch.tensor(3), "lr": 1e-3, "name": "run"}
    assert values.read(given) == {"loss": 0.5, "count": 3.0, "lr": 1e-3, "name": "run"}
    assert queue.events == []


def test_a_value_is_shown_from_the_reading_on_that_finds_its_event_passed(values: LatestValues, queue: Queue):
    loss = remote(1.0)
    assert values.read({"loss": loss}) == {}
    loss.fill_(9.0)  # a copy is not changed by what the value becomes
    assert values.read({"loss": remote(2.0)}) == {}  # still under way: no second copy joins the queue
    assert len(queue.events) == 1
    queue.events[0].passed = True
    assert values.read({"loss": remote(3.0)}) == {"loss": 1.0}
    queue.events[1].passed = True
    assert values.read({"loss": remote(4.0)}) == {"loss": 3.0}
    assert not any(event.waited for event in queue.events)


def test_order_is_kept_and_names_that_went_are_not_shown(values: LatestValues, queue: Queue):
    values.read({"loss": remote(1.0), "acc": remote(0.5)})
    queue.events[0].passed = True
    assert list(values.read({"acc": remote(0.5), "lr": 0.1, "loss": remote(1.0)}).items()) == [
        ("acc", 0.5),
        ("lr", 0.1),
        ("loss", 1.0),
    ]
    assert values.read({"acc": remote(0.5)}) == {"acc": 0.5}


def test_a_line_that_stays_waits_for_its_own_values(values: LatestValues, queue: Queue):
    values.read({"loss": remote(1.0)})
    assert values.read({"loss": remote(2.0)}, wait=True) == {"loss": 2.0}
    assert [event.waited for event in queue.events] == [True, True]


def test_a_name_may_change_its_dtype_and_shape_and_need_a_gradient(values: LatestValues, queue: Queue):
    values.read({"loss": remote(1.0)})
    queue.events[0].passed = True
    values.read({"loss": remote(1 / 3, torch.float64).reshape(1).requires_grad_()})
    queue.events[1].passed = True
    assert values.read({"loss": remote(0.0)}) == {"loss": 1 / 3}
