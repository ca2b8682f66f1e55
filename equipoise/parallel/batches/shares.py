"""Sizes of the parts of a batch, from relative shares of the devices.

Everything here is arithmetic on numbers; which device computes what is the strategies' business.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "DeviceTimes",
    "are_shares",
    "even_chunks",
    "even_sizes",
    "finish_together",
    "first_device_sizes",
    "sizes_by_shares",
]

_LEAST_GAIN = 0.03  # that uneven sizes must bring, as a fraction of the time
_MOST_NOISE = 0.3  # that is believed; more comes from a few steps that were disturbed


def are_shares(shares: Any) -> bool:
    """Whether something is a sequence of finite numbers from 0, not all of them 0.

    Example:
        >>> are_shares([2, 0, 3.5]), are_shares([0, 0]), are_shares("23")
        (True, False, False)
    """
    if not isinstance(shares, Sequence) or isinstance(shares, str):
        return False
    numbers = all(isinstance(share, (int, float)) and not isinstance(share, bool) for share in shares)
    return numbers and all(0 <= share < math.inf for share in shares) and any(shares)


def even_sizes(batch_size: int, devices: int) -> list[int]:
    """Sizes that differ by one at most, larger ones first.

    Example:
        >>> even_sizes(8, 5)
        [2, 2, 2, 1, 1]
    """
    least, larger = divmod(batch_size, devices)
    return [least + (index < larger) for index in range(devices)]


def even_chunks(batch_size: int, devices: int) -> list[int]:
    """The sizes of `torch.chunk`, which `nn.DataParallel` takes: devices at the end may be left with nothing.

    Example:
        >>> even_chunks(8, 5)
        [2, 2, 2, 2, 0]
    """
    size = -(-batch_size // devices)
    return [max(0, min(size, batch_size - index * size)) for index in range(devices)]


def sizes_by_shares(batch_size: int, shares: Sequence[float]) -> list[int]:
    """Sizes in proportion to shares, rounded by largest remainders (Hamilton's method); a share of 0 gets nothing.

    Args:
        batch_size: The number of samples.
        shares: Relative numbers from 0, not all of them 0.

    Example:
        >>> sizes_by_shares(11, [2, 3, 3])
        [3, 4, 4]
    """
    total = sum(shares)
    if math.isinf(total):
        shares = [share / max(shares) for share in shares]
        total = sum(shares)
    exact = [batch_size * share / total for share in shares]
    sizes = [int(part) for part in exact]
    by_remainder = sorted(
        (index for index in range(len(shares)) if shares[index] > 0),
        key=lambda index: (sizes[index] - exact[index], index),
    )
    for index in by_remainder[: batch_size - sum(sizes)]:
        sizes[index] += 1
    return sizes


def first_device_sizes(batch_size: int, devices: int, first: int) -> tuple[list[int], bool]:
    """The sizes of BalancedDataParallel, a class of Transformer-XL's training code (Dai et al., 2019).

    The first device gets `first` samples, the others share the rest evenly, lower ones first. That holds only where
    each of the others gets more than the first, else the split is that of `nn.DataParallel`, over the first device too
    unless `first` is 0.

    Args:
        batch_size: The number of samples.
        devices: The number of devices, at least two.
        first: The number of samples for the first device, from 0.

    Returns:
        The sizes, and whether the first device gets as many samples as it was to get.

    Example:
        >>> first_device_sizes(8, 3, 2)
        ([2, 3, 3], True)
        >>> first_device_sizes(8, 3, 4)
        ([3, 3, 2], False)
    """
    each, over = divmod(batch_size - first, devices - 1)
    if first < each:
        sizes = [first, *(each + (index < over) for index in range(devices - 1))]
    elif first == 0:
        sizes = [0, *even_chunks(batch_size, devices - 1)]
    else:
        sizes = even_chunks(batch_size, devices)
    return sizes, sizes[0] == first


@dataclass
class DeviceTimes:
    """What was measured of one device, and the line through it: a step on n samples takes `base + n * per_sample`.

    Attributes:
        measured: Numbers of samples and seconds.
        most: The largest number of samples that the device's memory holds; None where that is unknown.
    """

    measured: list[tuple[int, float]] = field(default_factory=list)
    most: int | None = None

    def fit(self) -> tuple[float, float]:
        """Base and time per sample, in seconds, by least squares over the quickest run of each size.

        Where only one size was measured, or the line falls or begins below 0, the base is taken as 0.
        """
        quickest: dict[int, float] = {}
        for size, seconds in self.measured:
            quickest[size] = min(seconds, quickest.get(size, seconds))
        sizes, times = list(quickest), list(quickest.values())
        mean_size, mean_time = sum(sizes) / len(sizes), sum(times) / len(times)
        spread = sum((size - mean_size) ** 2 for size in sizes)
        if spread:
            slope = sum((size - mean_size) * time for size, time in quickest.items()) / spread
            base = mean_time - slope * mean_size
            if slope > 0 and base >= 0:
                return base, slope
        return 0.0, max(sum(size * time for size, time in quickest.items()) / sum(size * size for size in sizes), 1e-12)

    def noise(self) -> list[float]:
        """How far runs of the same size lay apart, as a fraction of the quickest."""
        runs: dict[int, list[float]] = {}
        for size, seconds in self.measured:
            runs.setdefault(size, []).append(seconds)
        return [max(times) / min(times) - 1 for times in runs.values() if len(times) > 1 and min(times) > 0]


def finish_together(batch_size: int, devices: Sequence[DeviceTimes]) -> list[int]:
    """The sizes with which all devices finish as early as possible, each within its memory.

    The time by which the last device finishes is found by bisection over what all devices together manage in a given
    time. A device whose base alone takes longer is left out. Where even sizes take hardly longer, or no longer than
    measurements lie apart, they are even.

    Args:
        batch_size: The number of samples.
        devices: What was measured of each device.

    Returns:
        A size for each device. Where the memory of all of them together is too small, the sizes are in proportion to
        what each holds.
    """
    lines, limits = [device.fit() for device in devices], [device.most for device in devices]

    def seconds(sizes: Sequence[int]) -> float:
        return max(base + size * each if size else 0.0 for size, (base, each) in zip(sizes, lines, strict=True))

    sizes, even = _quickest(batch_size, lines, limits), even_sizes(batch_size, len(lines))
    noise = [apart for device in devices for apart in device.noise()]
    gain = max(_LEAST_GAIN, min(statistics.median(noise), _MOST_NOISE) if noise else 0.0)
    fits = all(limit is None or size <= limit for size, limit in zip(even, limits, strict=True))
    return even if fits and seconds(even) <= (1 + gain) * seconds(sizes) else sizes


def _quickest(batch_size: int, lines: Sequence[tuple[float, float]], limits: Sequence[int | None]) -> list[int]:
    """The same without regard to how sure the times are."""
    if all(limit is not None for limit in limits) and sum(limit or 0 for limit in limits) < batch_size:
        return sizes_by_shares(batch_size, [max(limit or 0, 1e-9) for limit in limits])

    def managed(seconds: float) -> list[float]:
        exact = [max(0.0, (seconds - base) / per_sample) for base, per_sample in lines]
        return [n if limit is None else min(n, limit) for n, limit in zip(exact, limits, strict=True)]

    low, high = 0.0, max(base + batch_size * per_sample for base, per_sample in lines)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(managed(middle)) >= batch_size else (middle, high)
    exact = managed(high)
    sizes = [int(n) for n in exact]
    while sum(sizes) < batch_size:  # to whom one sample more costs least
        free = [i for i, limit in enumerate(limits) if limit is None or sizes[i] < limit]
        best = min(free, key=lambda i: lines[i][0] + (sizes[i] + 1) * lines[i][1])
        sizes[best] += 1
    return sizes
