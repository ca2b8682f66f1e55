"""Which device computes which parts of a step, and the measurement from which shares of devices follow."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from equipoise.errors import ConfigurationError
from equipoise.parallel.batches.shares import DeviceTimes, are_shares, even_sizes, finish_together, sizes_by_shares

__all__ = ["PartShares", "PartTimes"]

# Measured steps, after one that warms up.
_STEPS = 4


class PartShares:
    """Shares the parts of a step out to devices.

    Args:
        count: The number of parts.
        setting: A number above 0 for each device, "auto", or None for even shares.

    Attributes:
        measures: Whether shares are measured.

    Raises:
        ConfigurationError: If the setting is none of these.
    """

    def __init__(self, count: int, setting: Any) -> None:
        self._count = count
        self.measures = setting == "auto"
        self._numbers: Sequence[float] | None = None
        # The number of devices; 0: unknown yet.
        self._devices = 0
        if not self.measures:
            self.use(setting)

    @property
    def numbers(self) -> Sequence[float] | None:
        """The shares in use; None: even ones."""
        return self._numbers

    def use(self, shares: Any) -> None:
        """Share out the parts by other numbers from now on, None: evenly.

        Raises:
            ConfigurationError: If they are not a number above 0 for each device.
        """
        if shares is not None:
            self._check(shares)
        self._numbers = shares

    def _check(self, shares: Any) -> None:
        if not are_shares(shares) or min(shares) <= 0:
            raise ConfigurationError(f"shares must be a number above 0 for each device, not {shares!r}.")
        if self._devices not in (0, len(shares)):
            raise ConfigurationError(f"shares={list(shares)!r} has {len(shares)} numbers for {self._devices} devices.")

    def connect(self, devices: int) -> None:
        """Note the number of devices.

        Raises:
            ConfigurationError: If there are more devices than parts, or another number of shares.
        """
        # Each device has a part in each step that has enough samples.
        if devices > self._count:
            raise ConfigurationError(
                f"VirtualDevicesStrategy(count={self._count}) has fewer virtual devices than the {devices} real ones."
                " Raise `count`, or take fewer devices."
            )
        self._devices = devices
        if self._numbers is None:
            return
        if self.measures and len(self._numbers) != devices:
            # Measured in a run on other devices.
            self._numbers = None
        else:
            self._check(self._numbers)

    def ranges(self) -> list[tuple[int, int]]:
        """Return the first part of each device and the part after its last one."""
        sizes = even_sizes(self._count, self._devices)
        if self._numbers is not None:
            sizes = sizes_by_shares(self._count, self._numbers)
            # Each device has one.
            while 0 in sizes:
                sizes[sizes.index(max(sizes))] -= 1
                sizes[sizes.index(0)] += 1
        ranges = []
        first = 0
        for size in sizes:
            ranges.append((first, first + size))
            first += size
        return ranges

    def places(self) -> list[int]:
        """Return the index of the device of each part."""
        places = []
        for place, (first, end) in enumerate(self.ranges()):
            places += [place] * (end - first)
        return places


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
        """Measure a part in a `with` block."""
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
