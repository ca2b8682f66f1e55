"""Shares by measurement: speed and memory of each device, found in the first steps of a run.

One step is left to warm up, then every device computes three sizes, twice each: its even part, a smaller and a larger
one. A line through the quickest times gives the shares with which all devices finish together.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from equipoise.parallel.batches.shares import DeviceTimes, finish_together, sizes_by_shares

__all__ = ["Calibration", "SimulatedDevice"]

T = TypeVar("T")

_TILTS = (0.0, 0.25, -0.25, 0.0, 0.25, -0.25)  # of odd devices up and of even ones down, then the other way round
_RESERVE = 0.9  # of a device's memory may be planned with


@dataclass(frozen=True, kw_only=True)
class SimulatedDevice:
    """A device made slower or smaller than it is, to try things out where all devices are equal.

    Attributes:
        seconds: Every part takes so much longer.
        seconds_per_sample: And so much longer for every sample.
        most_samples: A larger part runs out of memory. None: no limit.
    """

    seconds: float = 0.0
    seconds_per_sample: float = 0.0
    most_samples: int | None = None

    def compute(self, function: Callable[[], T], size: int) -> T:
        """Runs a function as this device would.

        Raises:
            OutOfMemoryError: Torch's, if the part is too large.
        """
        if self.most_samples is not None and size > self.most_samples:
            raise torch.OutOfMemoryError(f"This simulated device holds {self.most_samples} samples, not {size}.")
        answer = function()
        time.sleep(self.seconds + self.seconds_per_sample * size)
        return answer


class Calibration:
    """Measures devices while they compute, until it knows their shares.

    Args:
        devices: The devices.
        simulated: Devices that are simulated, by index.
    """

    def __init__(self, devices: Sequence[torch.device], simulated: Mapping[int, SimulatedDevice]) -> None:
        self.devices, self.simulated = devices, simulated
        self.times = [DeviceTimes() for _ in devices]
        for index, device in simulated.items():
            self.times[index].most = device.most_samples
        self._step = -1  # the warm-up
        self._batch_size = 0
        self._allocated: dict[int, tuple[int, int]] = {}  # by device: bytes before the last step, and its samples

    @property
    def is_done(self) -> bool:
        """Whether everything was measured."""
        return self._step >= len(_TILTS)

    def sizes(self, batch_size: int, steps: int | None = None) -> list[int]:
        """The sizes to measure next.

        Args:
            batch_size: The number of samples.
            steps: After how many steps. Default: those that were measured here.
        """
        step = self._step if steps is None else steps - 1
        tilt = _TILTS[step] if 0 <= step < len(_TILTS) else 0.0
        shares = [1 + (tilt if index % 2 else -tilt) for index in range(len(self.devices))]
        return _within(sizes_by_shares(batch_size, shares), [times.most for times in self.times])

    def measured(self, index: int, function: Callable[[], T], size: int) -> Callable[[], T]:
        """The same function, timed; with waiting for the device, which only these first steps do.

        Args:
            index: The device.
            function: Computes a part on it.
            size: The part's number of samples.
        """
        device = self.devices[index]

        def timed() -> T:
            self._read_memory(index, device, size)
            _wait_for(device)
            start = time.perf_counter()
            answer = function()
            _wait_for(device)
            if self._step >= 0:
                self.times[index].measured.append((size, time.perf_counter() - start))
            return answer

        return timed

    def limit(self, index: int, most: int) -> None:
        """A device holds so many samples and no more."""
        known = self.times[index].most
        self.times[index].most = most if known is None else min(known, most)

    def end_step(self, batch_size: int) -> None:
        """All parts of a batch were measured."""
        self._step += 1
        self._batch_size = max(self._batch_size, batch_size)

    def result(self) -> list[int]:
        """The sizes of a full batch with which all devices finish together."""
        return finish_together(self._batch_size, self.times)

    def _read_memory(self, index: int, device: torch.device, size: int) -> None:
        """How many samples fit, by the peak of the last step, its backward included."""
        if device.type != "cuda":
            return
        if index in self._allocated:
            before, samples = self._allocated[index]
            per_sample = max(torch.cuda.max_memory_allocated(device) - before, 1) / samples
            free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - before
            self.limit(index, max(1, int(_RESERVE * free / per_sample)))
        torch.cuda.reset_peak_memory_stats(device)
        self._allocated[index] = torch.cuda.memory_allocated(device), size


def _within(sizes: list[int], limits: Sequence[int | None]) -> list[int]:
    """Sizes within limits, what is too much given to devices with room; unchanged where all together have none."""
    room = [float("inf") if limit is None else limit - size for size, limit in zip(sizes, limits, strict=True)]
    if sum(room) < 0:
        return sizes
    for index in range(len(sizes)):
        while room[index] < 0:
            other = max(range(len(sizes)), key=room.__getitem__)
            sizes[index], sizes[other] = sizes[index] - 1, sizes[other] + 1
            room[index], room[other] = room[index] + 1, room[other] - 1
    return sizes


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
