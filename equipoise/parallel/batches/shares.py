"""Sizes of the parts of a batch, from relative shares of the devices.

Everything here is arithmetic on numbers; the strategies decide which device computes which part.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from equipoise.validation import is_number

__all__ = [
    "DeviceTimes",
    "are_shares",
    "even_chunks",
    "even_sizes",
    "finish_together",
    "first_device_sizes",
    "sizes_by_shares",
]

# Base and time per sample, in seconds.
Line = tuple[float, float]

# Uneven sizes must gain at least this fraction of the time.
_LEAST_GAIN = 0.03
# Largest noise of measurements that counts. More noise comes from a few disturbed steps.
_MOST_NOISE = 0.3


def are_shares(shares: Any) -> bool:
    """Return whether a value is a sequence of finite numbers from 0, not all of them 0.

    Example:
        >>> are_shares([2, 0, 3.5]), are_shares([0, 0]), are_shares("23")
        (True, False, False)
    """
    # A string is a sequence, too.
    if isinstance(shares, str) or not isinstance(shares, Sequence):
        return False
    return all(is_number(share) and 0 <= share < math.inf for share in shares) and any(shares)


def even_sizes(batch_size: int, devices: int) -> list[int]:
    """Return sizes that differ by one at most, larger ones first.

    Args:
        batch_size: The number of samples.
        devices: The number of parts.

    Example:
        >>> even_sizes(8, 5)
        [2, 2, 2, 1, 1]
    """
    least, larger = divmod(batch_size, devices)
    sizes = [least] * devices
    for index in range(larger):
        sizes[index] += 1
    return sizes


def even_chunks(batch_size: int, devices: int) -> list[int]:
    """Return the sizes of `torch.chunk`, which `nn.DataParallel` uses: the last devices may get no samples.

    Args:
        batch_size: The number of samples.
        devices: The number of parts.

    Example:
        >>> even_chunks(8, 5)
        [2, 2, 2, 2, 0]
    """
    # Rounded up.
    chunk_size = -(-batch_size // devices)
    sizes = []
    rest = batch_size
    for _ in range(devices):
        size = min(chunk_size, rest)
        sizes.append(size)
        rest -= size
    return sizes


def sizes_by_shares(batch_size: int, shares: Sequence[float]) -> list[int]:
    """Return sizes in proportion to shares, rounded by largest remainders (Hamilton's method).

    Args:
        batch_size: The number of samples.
        shares: Relative numbers from 0, not all of them 0. A share of 0 gets no samples.

    Example:
        >>> sizes_by_shares(11, [2, 3, 3])
        [3, 4, 4]
    """
    # 1. The sum of huge shares may overflow.
    total = sum(shares)
    if math.isinf(total):
        largest = max(shares)
        shares = [share / largest for share in shares]
        total = sum(shares)

    # 2. Exact sizes, rounded down.
    exact_sizes = []
    sizes = []
    for share in shares:
        exact = batch_size * share / total
        exact_sizes.append(exact)
        sizes.append(int(exact))

    # 3. The samples that remain go to the largest remainders, lower indices first.
    def order(index: int) -> tuple[float, int]:
        remainder = exact_sizes[index] - sizes[index]
        return -remainder, index

    candidates = sorted((index for index, share in enumerate(shares) if share > 0), key=order)
    remaining = batch_size - sum(sizes)
    for index in candidates[:remaining]:
        sizes[index] += 1
    return sizes


def first_device_sizes(
    batch_size: int,
    devices: int,
    first: int,
) -> tuple[list[int], bool]:
    """Return the sizes of BalancedDataParallel, a class of Transformer-XL's training code (Dai et al., 2019).

    The first device gets `first` samples, the others share the rest evenly, lower ones first. That holds only where
    each of the others gets more than the first. Otherwise the split is that of `nn.DataParallel`, over the first device
    too unless `first` is 0.

    Args:
        batch_size: The number of samples.
        devices: The number of devices, at least two.
        first: The number of samples for the first device, from 0.

    Returns:
        The sizes, and whether the first device gets `first` samples.

    Example:
        >>> first_device_sizes(8, 3, 2)
        ([2, 3, 3], True)
        >>> first_device_sizes(8, 3, 4)
        ([3, 3, 2], False)
    """
    rest = batch_size - first
    later_devices = devices - 1
    if first < rest // later_devices:
        sizes = [first, *even_sizes(rest, later_devices)]
    elif first == 0:
        sizes = [0, *even_chunks(batch_size, later_devices)]
    else:
        sizes = even_chunks(batch_size, devices)
    return sizes, sizes[0] == first


@dataclass
class DeviceTimes:
    """Measurements of one device, and the line through them: a step on n samples takes `base + n * per_sample`.

    Attributes:
        measured: Numbers of samples and seconds.
        most: The largest number of samples that the device's memory holds. None: unknown.
    """

    measured: list[tuple[int, float]] = field(default_factory=list)
    most: int | None = None

    def add(self, size: int, seconds: float) -> None:
        """Add the measurement of a part of this number of samples."""
        self.measured.append((size, seconds))

    def limit(self, most: int) -> None:
        """Lower the largest number of samples to this one, if it is larger or unknown."""
        if self.most is None or most < self.most:
            self.most = most

    def fit(self) -> Line:
        """Return base and time per sample, in seconds, by least squares over the quickest run of each size.

        If only one size was measured, or if the line falls or begins below 0, the base is 0.
        """
        # 1. The quickest run of each size is the least disturbed.
        sizes = []
        times = []
        for size, runs in self._runs_by_size().items():
            sizes.append(size)
            times.append(min(runs))

        # 2. The least-squares line with a base.
        mean_size = sum(sizes) / len(sizes)
        mean_time = sum(times) / len(times)
        distances = [size - mean_size for size in sizes]
        variance = _dot(distances, distances)
        if variance:
            covariance = _dot(distances, times)
            slope = covariance / variance
            base = mean_time - slope * mean_size
            if slope > 0 and base >= 0:
                return base, slope

        # 3. Otherwise the least-squares line through the origin.
        products = _dot(sizes, times)
        slope = products / _dot(sizes, sizes)
        return 0.0, max(slope, 1e-12)

    def noise(self) -> list[float]:
        """Return how far runs of the same size differ, as fractions of the quickest."""
        spreads = []
        for runs in self._runs_by_size().values():
            shortest = min(runs)
            if len(runs) > 1 and shortest > 0:
                spreads.append(max(runs) / shortest - 1)
        return spreads

    def _runs_by_size(self) -> dict[int, list[float]]:
        runs: dict[int, list[float]] = {}
        for size, seconds in self.measured:
            runs.setdefault(size, []).append(seconds)
        return runs


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def finish_together(batch_size: int, devices: Sequence[DeviceTimes]) -> list[int]:
    """Return the sizes with which all devices finish as early as possible, each within its memory.

    Bisection finds the time by which the last device finishes: all devices together compute the batch in that time. A
    device whose base alone takes longer gets no samples. The sizes are even if even sizes take hardly longer, or if the
    difference is within the noise of the measurements.

    Args:
        batch_size: The number of samples.
        devices: The measurements of each device.

    Returns:
        A size for each device. If the memory of all of them together is too small, the sizes are in proportion to the
        memory of each.
    """
    # 1. Lines and limits of memory, and the quickest sizes by them.
    lines = [device.fit() for device in devices]
    limits = [device.most for device in devices]
    sizes = _quickest_sizes(batch_size, lines, limits)

    # 2. Even sizes, if they fit.
    even = even_sizes(batch_size, len(devices))
    pairs = zip(even, limits, strict=True)
    for size, limit in pairs:
        if limit is not None and size > limit:
            return sizes

    # 3. The gain of uneven sizes must exceed the noise.
    noise: list[float] = []
    for device in devices:
        noise.extend(device.noise())
    least_gain = _LEAST_GAIN
    if noise:
        typical_noise = min(statistics.median(noise), _MOST_NOISE)
        least_gain = max(least_gain, typical_noise)
    seconds = _seconds(sizes, lines)
    even_seconds = _seconds(even, lines)
    if even_seconds <= (1 + least_gain) * seconds:
        return even
    return sizes


def _seconds(sizes: Sequence[int], lines: Sequence[Line]) -> float:
    """Return the time of the slowest device. A device without samples takes none."""
    slowest = 0.0
    pairs = zip(sizes, lines, strict=True)
    for size, (base, per_sample) in pairs:
        if size:
            slowest = max(slowest, base + size * per_sample)
    return slowest


def _quickest_sizes(
    batch_size: int,
    lines: Sequence[Line],
    limits: Sequence[int | None],
) -> list[int]:
    """Return the sizes with which the last device finishes first, regardless of noise."""
    # 1. Memory that is too small is shared out in proportion; no device gets a share of 0.
    if None not in limits:
        capacities = [limit or 0 for limit in limits]
        if sum(capacities) < batch_size:
            shares = [max(capacity, 1e-9) for capacity in capacities]
            return sizes_by_shares(batch_size, shares)

    # 2. The time in which all devices together compute the batch, by bisection.
    low = 0.0
    high = 0.0
    for base, per_sample in lines:
        # The time in which this device computes the batch alone.
        alone = base + batch_size * per_sample
        high = max(high, alone)
    for _ in range(100):
        middle = (low + high) / 2
        exact_sizes = _samples_within(middle, lines, limits)
        if sum(exact_sizes) >= batch_size:
            high = middle
        else:
            low = middle

    # 3. Whole samples. Each sample that remains goes to the device that finishes it first.
    exact_sizes = _samples_within(high, lines, limits)
    sizes = [int(exact) for exact in exact_sizes]

    def end_with_one_more(index: int) -> float:
        base, per_sample = lines[index]
        return base + (sizes[index] + 1) * per_sample

    while sum(sizes) < batch_size:
        with_room = [index for index, limit in enumerate(limits) if limit is None or sizes[index] < limit]
        best = min(with_room, key=end_with_one_more)
        sizes[best] += 1
    return sizes


def _samples_within(
    seconds: float,
    lines: Sequence[Line],
    limits: Sequence[int | None],
) -> list[float]:
    """Return the number of samples, not rounded, that each device computes in a time, within its memory."""
    samples = []
    pairs = zip(lines, limits, strict=True)
    for (base, per_sample), limit in pairs:
        exact = (seconds - base) / per_sample
        exact = max(0.0, exact)
        if limit is not None:
            exact = min(exact, limit)
        samples.append(exact)
    return samples
