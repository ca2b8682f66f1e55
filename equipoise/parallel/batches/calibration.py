"""Shares by measurement: speed and memory of each device, found in the first steps of a run.

The first step is a warm-up. Then every device computes three sizes, twice each: its even part, a smaller and a larger
one. A line through the quickest times gives the shares with which all devices finish together.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from equipoise.memory.devices import PeakWatch
from equipoise.parallel.batches.shares import DeviceTimes, finish_together, sizes_by_shares

__all__ = ["Calibration", "SimulatedDevice"]

T = TypeVar("T")

# In the warm-up and each measured step: the fraction by which parts of odd devices grow, and those of even ones shrink.
_TILTS = (0.0, 0.0, 0.25, -0.25, 0.0, 0.25, -0.25)
# Fraction of a device's memory that may be used.
_RESERVE = 0.9


@dataclass(frozen=True, kw_only=True)
class SimulatedDevice:
    """A device that acts slower or smaller than it is, to try strategies where all devices are equal.

    Attributes:
        seconds: Time added to every part. Default: 0.
        seconds_per_sample: Time added for every sample. Default: 0.
        most_samples: A larger part runs out of memory. Default: None, which is no limit.
    """

    seconds: float = 0.0
    seconds_per_sample: float = 0.0
    most_samples: int | None = None

    def compute(self, function: Callable[[], T], size: int) -> T:
        """Run a function as this device would.

        Args:
            function: Computes a part.
            size: The part's number of samples.

        Raises:
            OutOfMemoryError: Torch's, if the part is too large.
        """
        most = self.most_samples
        if most is not None and size > most:
            raise torch.OutOfMemoryError(f"This simulated device holds {most} samples, not {size}.")
        result = function()
        time.sleep(self.seconds + self.seconds_per_sample * size)
        return result


class Calibration:
    """Measures devices while they compute, until their shares are known.

    Args:
        devices: The devices.
        simulated: Devices that are simulated, by index.

    Attributes:
        times: The measurements of each device.
    """

    def __init__(self, devices: Sequence[torch.device], simulated: Mapping[int, SimulatedDevice]) -> None:
        self.devices = devices
        self.simulated = simulated
        self.times = [DeviceTimes() for _ in devices]
        for index, device in simulated.items():
            times = self.times[index]
            if device.most_samples is not None:
                times.limit(device.most_samples)
        # Number of steps done. The first one is the warm-up.
        self._step = 0
        # Number of samples of the largest batch.
        self._batch_size = 0
        # For each device: bytes allocated before the last step, and the number of samples of that step.
        self._allocated: dict[int, tuple[int, int]] = {}
        # The peak of each device since then; that of torch may be reset by callbacks that read memory.
        self._peaks: dict[int, PeakWatch] = {}

    @property
    def is_done(self) -> bool:
        """True if all steps are done."""
        return self._step >= len(_TILTS)

    def sizes(self, batch_size: int, steps: int | None = None) -> list[int]:
        """Return the sizes to measure next.

        Args:
            batch_size: The number of samples.
            steps: The number of steps before this one. Default: the steps so far.
        """
        step = self._step if steps is None else steps
        tilt = _TILTS[step] if step < len(_TILTS) else 0.0
        shares = [1 + tilt if index % 2 else 1 - tilt for index in range(len(self.devices))]
        sizes = sizes_by_shares(batch_size, shares)
        return _within(sizes, [times.most for times in self.times])

    def measured(self, index: int, function: Callable[[], T], size: int) -> Callable[[], T]:
        """Return a function that runs another one and measures it.

        It waits for the device before and after, which only these first steps do.

        Args:
            index: The index of the device.
            function: Computes a part on it.
            size: The part's number of samples.
        """
        device = self.devices[index]
        times = self.times[index]

        def timed() -> T:
            self._limit_by_memory(index, device, size)
            _wait_for(device)
            start = time.perf_counter()
            result = function()
            _wait_for(device)
            if self._step > 0:
                times.add(size, time.perf_counter() - start)
            return result

        return timed

    def limit(self, index: int, most: int) -> None:
        """Note the largest number of samples that a device holds. The smallest such number counts."""
        self.times[index].limit(most)

    def end_step(self, batch_size: int) -> None:
        """Count a step of which all parts were measured."""
        self._step += 1
        self._batch_size = max(self._batch_size, batch_size)

    def result(self) -> list[int]:
        """Return the sizes of a full batch with which all devices finish together."""
        return finish_together(self._batch_size, self.times)

    def _limit_by_memory(self, index: int, device: torch.device, size: int) -> None:
        """Limit the samples to those that fit, by the peak of the last step, its backward included."""
        if device.type != "cuda":
            return
        if index in self._allocated:
            # 1. Bytes of one sample in the last step.
            allocated, last_size = self._allocated[index]
            used = max(self._peaks[index].peak() - allocated, 1)
            per_sample = used / last_size
            # 2. Bytes that a step may use: unused ones of the device and of torch's allocator.
            unused, _ = torch.cuda.mem_get_info(device)
            free = unused + torch.cuda.memory_reserved(device) - allocated
            most = int(_RESERVE * free / per_sample)
            self.limit(index, max(1, most))
            self._peaks[index].start()
        else:
            self._peaks[index] = PeakWatch(device)
        allocated = torch.cuda.memory_allocated(device)
        self._allocated[index] = (allocated, size)


def _within(sizes: list[int], limits: Sequence[int | None]) -> list[int]:
    """Return sizes within limits: surplus samples go to the device with the most room.

    The sizes remain as they are if all limits together are too small.
    """
    room: list[float] = []
    for size, limit in zip(sizes, limits, strict=True):
        if limit is None:
            room.append(math.inf)
        else:
            room.append(limit - size)
    if sum(room) < 0:
        return sizes
    for index in range(len(sizes)):
        while room[index] < 0:
            roomiest = room.index(max(room))
            sizes[index] -= 1
            room[index] += 1
            sizes[roomiest] += 1
            room[roomiest] -= 1
    return sizes


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
