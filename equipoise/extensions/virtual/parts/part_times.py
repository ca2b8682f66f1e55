"""Seconds that parts take on each device of a process, from which the shares of the devices follow."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from equipoise.parallel.batches.shares import DeviceTimes, finish_together

__all__ = ["PartTimes"]

# Measured steps, after one that warms up.
_STEPS = 4


class PartTimes:
    """Measures parts in the first steps, for which it waits for the devices.

    Args:
        devices: The devices.
        clock: Function that returns seconds. Default: `time.perf_counter`.
    """

    def __init__(self, devices: Sequence[torch.device], clock: Callable[[], float] = time.perf_counter) -> None:
        self._devices = devices
        self._clock = clock
        self._times = [DeviceTimes() for _ in devices]
        # -1 is the warm-up.
        self._step = -1

    @contextmanager
    def measured(self, place: int) -> Iterator[None]:
        """Measure a part in a `with` block.

        Args:
            place: Index of its device.
        """
        device = self._devices[place]
        _wait_for(device)
        begin = self._clock()
        yield
        _wait_for(device)
        if self._step >= 0:
            self._times[place].add(1, self._clock() - begin)

    def end_step(self, count: int) -> list[int] | None:
        """Return the number of parts of each device with which all finish together; None: more steps are needed.

        Args:
            count: The number of parts of a step.
        """
        self._step += 1
        is_known = all(times.measured for times in self._times)
        if self._step < _STEPS or not is_known:
            return None
        return finish_together(count, self._times)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
