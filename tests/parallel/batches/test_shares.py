"""Sizes: those of BalancedDataParallel to the sample, largest remainders, and the earliest end of all devices."""

import itertools
from dataclasses import replace
from fractions import Fraction
from math import ceil, floor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from equipoise.parallel.batches.shares import (
    DeviceTimes,
    finish_together,
    first_device_sizes,
    sizes_by_shares,
)

# Even sizes


# BalancedDataParallel


def plain_split(batch_size: int, devices: int) -> list[int]:
    """That of DataParallel: chunks of the same size until nothing is left."""
    sizes, left = [0] * devices, batch_size
    for device in range(devices):
        sizes[device] = min(ceil(batch_size / devices), left)
        left -= sizes[device]
    return sizes


def balanced_data_parallel(batch_size: int, devices: int, first: int) -> list[int]:
    """Return the share of each device in BalancedDataParallel with `gpu0_bsz=first`."""
    unit = floor(Fraction(batch_size - first, devices - 1))
    if first < unit:
        sizes = [first] + [unit] * (devices - 1)
        for entry in range(1, batch_size - first - unit * (devices - 1) + 1):  # the remainder, lowest devices first
            sizes[entry] += 1
        return sizes
    if first == 0:
        return [0, *plain_split(batch_size, devices - 1)]
    return plain_split(batch_size, devices)


@settings(deadline=None)
@given(batch_size=st.integers(0, 500), devices=st.integers(2, 16), first=st.integers(0, 80))
@example(batch_size=3, devices=5, first=0)  # fewer samples than other devices
@example(batch_size=8, devices=3, first=4)  # as many for the first as for each of the others
def test_the_rule_of_balanced_data_parallel(batch_size: int, devices: int, first: int) -> None:
    sizes, as_asked = first_device_sizes(batch_size, devices, first)
    assert sizes == balanced_data_parallel(batch_size, devices, first)
    assert (len(sizes), sum(sizes)) == (devices, batch_size)
    assert as_asked == (sizes[0] == first)
    assert sizes[0] <= max(first, ceil(batch_size / devices))  # a number too large never loads the first unevenly


# Largest remainders

whole_shares = st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any)


@settings(deadline=None)
@given(batch_size=st.integers(0, 1000), shares=whole_shares, factor=st.integers(1, 9))
def test_the_largest_remainders_are_rounded_up(batch_size: int, shares: list[int], factor: int) -> None:
    sizes = sizes_by_shares(batch_size, shares)
    assert sum(sizes) == batch_size
    exact = [Fraction(batch_size * share, sum(shares)) for share in shares]
    assert all(size in (floor(part), ceil(part)) for size, part in zip(sizes, exact, strict=True))
    up = [part - floor(part) for size, part in zip(sizes, exact, strict=True) if size > part]
    down = [part - floor(part) for size, part in zip(sizes, exact, strict=True) if size < part]
    assert not up or not down or min(up) >= max(down)
    assert sizes_by_shares(batch_size, [share * factor for share in shares]) == sizes  # relative numbers


@pytest.mark.parametrize(
    ("batch_size", "shares", "sizes"),
    [
        (7, [1, 1], [4, 3]),  # of two equal remainders that of the first
        (2, [1, 1, 1, 1], [1, 1, 0, 0]),
        (0, [1, 2], [0, 0]),
        (6, [0.1, 0.2, 0.3], [1, 2, 3]),  # whose sum is not 0.6
        (11, [2e307, 8e307, 1e308], [1, 4, 6]),
    ],
)
def test_sizes_by_shares_in_special_cases(batch_size: int, shares: list[float], sizes: list[int]) -> None:
    assert sizes_by_shares(batch_size, shares) == sizes


# Times


@pytest.mark.parametrize(
    ("measured", "line"),
    [
        ([(1, 9.0), (1, 1.5), (2, 2.0), (2, 7.0), (5, 3.5)], (1, 0.5)),
        ([(4, 2.0), (4, 3.0)], (0, 0.5)),  # one size: the quickest
        ([(2, 2.0), (4, 1.0)], (0, 0.4)),  # falling: (2·2 + 4·1) / (4 + 16)
        ([(2, 1.0), (4, 3.0)], (0, 0.7)),  # begins below 0: (2·1 + 4·3) / 20
        ([(1, 1.0), (2, 3.0), (3, 2.0)], (1, 0.5)),  # not on one line: least squares
        ([(4, 0.0)], (0, 1e-12)),  # never 0
    ],
)
def test_the_line_through_the_quickest_runs(measured: list[tuple[int, float]], line: tuple[float, float]) -> None:
    assert DeviceTimes(measured).fit() == pytest.approx(line)


# The earliest end

device = st.builds(
    lambda base, per_sample, most: DeviceTimes([(1, base + per_sample), (2, base + 2 * per_sample)], most),
    st.integers(0, 8).map(float),
    st.integers(1, 8).map(float),
    st.none() | st.integers(0, 8),
)


def end(sizes: tuple[int, ...] | list[int], devices: list[DeviceTimes]) -> float:
    """When the last device finishes."""
    lines = [device.fit() for device in devices]
    return max(base + n * per_sample if n else 0.0 for n, (base, per_sample) in zip(sizes, lines, strict=True))


def within(sizes: tuple[int, ...] | list[int], devices: list[DeviceTimes]) -> bool:
    return all(device.most is None or size <= device.most for size, device in zip(sizes, devices, strict=True))


@settings(deadline=None)
@given(batch_size=st.integers(1, 12), devices=st.lists(device, min_size=1, max_size=4))
def test_no_other_sizes_end_earlier(batch_size: int, devices: list[DeviceTimes]) -> None:
    every = [
        (*some, batch_size - sum(some))
        for some in itertools.product(range(batch_size + 1), repeat=len(devices) - 1)
        if sum(some) <= batch_size
    ]
    possible = [sizes for sizes in every if within(sizes, devices)]
    sizes = finish_together(batch_size, devices)
    assert sum(sizes) == batch_size
    if possible:
        assert within(sizes, devices)
        earliest = min(end(each, devices) for each in possible)
        assert end(sizes, devices) <= earliest * (1.03 if max(sizes) - min(sizes) <= 1 else 1) * (1 + 1e-9)


def line(base: float, per_sample: float, most: int | None = None) -> DeviceTimes:
    return DeviceTimes([(n, base + n * per_sample) for n in (1, 2)], most)


@pytest.mark.parametrize(
    ("batch_size", "devices", "sizes"),
    [
        (10, [line(2, 1), line(0, 2)], [6, 4]),
        (8, [line(0, 1, most=3), line(0, 3)], [3, 5]),
        (12, [line(0, 1, most=2), line(0, 1, most=4)], [4, 8]),  # too little memory: in proportion to it
        (4, [line(0, 1, most=0), line(0, 1, most=0)], [2, 2]),
    ],
)
def test_sizes_that_finish_together(batch_size: int, devices: list[DeviceTimes], sizes: list[int]) -> None:
    assert finish_together(batch_size, devices) == sizes


def test_what_noise_may_explain_stays_even() -> None:
    assert finish_together(20, [line(0, 1), line(0, 1.04)]) == [10, 10]
    assert finish_together(20, [line(0, 1), line(0, 1.5)]) == [12, 8]
    first = DeviceTimes([(8, 1.0), (8, 1.25), (12, 1.5), (12, 1.8)])  # 20 per cent apart
    second = DeviceTimes([(8, 1.1), (8, 1.4), (12, 1.8), (12, 2.2)])
    assert finish_together(20, [first, second]) == [10, 10]
    steady = [DeviceTimes(each.measured[::2]) for each in (first, second)]
    assert finish_together(20, steady) == [11, 9]
    assert finish_together(20, [replace(first, most=6), second]) == [6, 14]  # memory is no matter of noise
    wild = DeviceTimes([(8, 1.0), (8, 9.0), (12, 1.5), (12, 9.0)])
    slow = DeviceTimes([(8, 3.0), (8, 9.0), (12, 4.5), (12, 9.0)])
    assert finish_together(20, [wild, slow]) == [15, 5]  # three times as slow is believed
