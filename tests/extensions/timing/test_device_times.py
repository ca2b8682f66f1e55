"""Times of a device, by events that pass when the test says so. Not run on a GPU."""

from typing import Any

import pytest
import torch

from equipoise.extensions.timing import parts
from equipoise.extensions.timing.device_times import DeviceTimes
from equipoise.extensions.timing.parts import Cell
from equipoise.extensions.timing.run_times import without_inner_parts


class Device:
    """A device that takes milliseconds for what was recorded, and may be behind."""

    def __init__(self) -> None:
        self.milliseconds = 0.0
        self.is_behind = False
        self.records = 0

    def event(self, enable_timing: bool) -> "Event":
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at = float("nan")

    def record(self) -> None:
        self.at = self.device.milliseconds
        self.device.records += 1

    def query(self) -> bool:
        return not self.device.is_behind

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    return device


def run_steps(times: DeviceTimes, device: Device, count: int, *, backward: bool = True) -> None:
    """Take steps of 1 ms of reading, 2 of copying, 4 of the forward, 8 of the backward, 16 and 32 of the rest."""

    def work(milliseconds: float) -> Any:
        def run() -> None:
            device.milliseconds += milliseconds

        return run

    run_backward = times.marking(work(8), parts.BACKWARD) if backward else work(8)

    def compute() -> None:
        device.milliseconds += 4
        run_backward()

    read = times.marking(work(1), parts.DATA)
    copy = times.marking(work(2), parts.COPYING)
    forward_backward = times.marking(compute, parts.FORWARD)

    def optimise() -> None:
        forward_backward()
        device.milliseconds += 16

    step = times.marking(optimise, parts.STEP)
    for _ in range(count):
        times.begin_step()
        read()
        copy()
        step()
        device.milliseconds += 32


def test_one_step_of_many_is_read(device: Device) -> None:
    times = DeviceTimes()
    run_steps(times, device, 2 * 47 + 1)
    assert times.read()
    # Seven events in each of two steps.
    assert device.records == 14
    assert [1000 * seconds for seconds in times.seconds.values()] == pytest.approx([2, 4, 8, 16, 32, 64])


def test_a_step_without_a_border_between_forward_and_backward(device: Device) -> None:
    """A compiled step computes forward and backward as one."""
    times = DeviceTimes()
    run_steps(times, device, 48, backward=False)
    assert times.read()
    assert [1000 * seconds for seconds in times.seconds.values()] == pytest.approx([1, 2, 0, 12, 16, 32])


def test_nothing_waits_for_a_device_that_is_behind(device: Device) -> None:
    times = DeviceTimes()
    device.is_behind = True
    run_steps(times, device, 200)
    assert not times.read()
    assert device.records == 7
    device.is_behind = False
    assert times.read()
    assert sum(times.seconds.values()) == pytest.approx(0.063)


@pytest.mark.parametrize("in_parts", [False, True], ids=["before a validation", "in parts"])
def test_a_step_before_a_validation_or_in_parts_is_left_out(device: Device, in_parts: bool) -> None:
    times = DeviceTimes()
    run_steps(times, device, 47)
    if in_parts:
        times.marking(lambda: None, parts.STEP)()
    else:
        times.leave_out()
    run_steps(times, device, 1)
    assert times.read()
    assert sum(times.seconds.values()) == 0


def test_the_parts_of_a_step_are_those_of_the_device() -> None:
    """The host is done with a step soon, and waits in the callback for the device."""
    cells = {
        Cell(parts.DATA): 1.0,
        Cell(parts.STEP): 3.0,
        Cell(parts.FORWARD, within="optimiser"): 2.0,
        Cell(parts.BACKWARD, within="forward"): 1.0,
        Cell(parts.CALLBACK, "Waiting"): 5.0,
        Cell(parts.VALIDATION): 10.0,
    }
    device = {parts.DATA: 0.0, parts.FORWARD: 0.03, parts.BACKWARD: 0.06, parts.STEP: 0.0, parts.REST: 0.01}
    found = without_inner_parts(cells, 20.0, device)
    assert found[parts.VALIDATION] == 10
    assert found[parts.DATA] == 0
    assert found[parts.FORWARD] == pytest.approx(3.0)
    assert found[parts.BACKWARD] == pytest.approx(6.0)
    assert found["callback Waiting"] + found[parts.REST] == pytest.approx(1.0)
    assert sum(found.values()) == pytest.approx(20.0)
