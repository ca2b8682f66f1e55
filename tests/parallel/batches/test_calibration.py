"""Devices are measured in a few steps, at several sizes each, and end up with the shares that finish together.

The clock stands still here but for simulated devices: they set it forward instead of sleeping.
"""

from collections.abc import Callable

import pytest
import torch

from equipoise.parallel.batches import calibration
from equipoise.parallel.batches.calibration import Calibration, SimulatedDevice
from tests.support.simulated_time import SimulatedTime

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimulatedTime:
    made = SimulatedTime()
    monkeypatch.setattr(calibration, "time", made)
    return made


def device(seconds: float = 0.0, per_sample: float = 0.0, most: int | None = None) -> SimulatedDevice:
    return SimulatedDevice(seconds=seconds, seconds_per_sample=per_sample, most_samples=most)


def step(measuring: Calibration, simulated: dict[int, SimulatedDevice], batch_size: int) -> list[int]:
    """Do what a strategy does in a step."""
    sizes = measuring.sizes(batch_size)

    def work(index: int) -> Callable[[], int]:
        size = sizes[index]
        return measuring.measured(index, lambda: simulated[index].compute(lambda: index, size), size)

    assert [work(index)() for index in range(len(sizes))] == list(range(len(sizes)))
    measuring.end_step(batch_size)
    return sizes


# Measuring


@pytest.mark.parametrize(
    ("simulated", "batch_size", "sizes"),
    [
        ([device(0, 1), device(0, 3)], 64, [48, 16]),
        ([device(6, 1), device(0, 1)], 40, [17, 23]),
        ([device(0, 1, most=20), device(0, 3)], 64, [20, 44]),
        ([device(0, 1, most=4), device(0, 1)], 24, [4, 20]),
    ],
)
def test_shares_with_which_all_finish_together(
    simulated: list[SimulatedDevice], batch_size: int, sizes: list[int]
) -> None:
    by_index = dict(enumerate(simulated))
    measuring = Calibration([CPU] * len(simulated), by_index)
    while not measuring.is_done:
        taken = step(measuring, by_index, batch_size)  # no device runs out of memory
        assert sum(taken) == batch_size
    assert measuring.result() == sizes


def test_a_device_that_fails_is_not_measured() -> None:
    measuring = Calibration([CPU, CPU], {})
    measuring.end_step(8)

    def fail() -> None:
        raise ValueError("too bad")

    with pytest.raises(ValueError, match="too bad"):
        measuring.measured(0, fail, 4)()
    assert measuring.times[0].measured == []


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [
        ([None, None, None], [4, 4, 4]),
        ([2, 5, None], [2, 4, 6]),
        ([0, 8, 4], [0, 8, 4]),
        ([2, 4, 5], [4, 4, 4]),  # all together have no room: nothing helps
    ],
)
def test_sizes_to_measure_stay_within_limits(limits: list[int | None], sizes: list[int]) -> None:
    simulated = {index: device(most=most) for index, most in enumerate(limits)}
    assert Calibration([CPU] * 3, simulated).sizes(12) == sizes
