"""Memory readings of all devices of a process, by phase of a step."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from equipoise.memory.devices import read_memory, reset_peak
from equipoise.memory.records import Composition, MemoryPoint
from equipoise.memory.resident_set import resident_bytes

__all__ = [
    "ByPhase",
    "Reading",
    "Readings",
    "by_device",
    "larger",
    "metrics_of",
    "points_of",
    "thin_out",
    "to_mib",
    "with_largest",
]

_MOST_POINTS = 20_000


class Reading(NamedTuple):
    """Memory of a device in bytes; None for values that it does not report."""

    allocated: int
    reserved: int | None = None
    peak: int | None = None


# Readings by device and phase.
ByPhase = dict[tuple[str, str], Reading]


class Readings:
    """Read devices at the end of phases."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = list(devices)
        self._read: ByPhase = {}

    def reset(self) -> None:
        """Reset the peaks of CUDA devices at the start of a phase. A CPU's peak is slow to read, so it is not read."""
        for device in self.devices:
            if device.type == "cuda":
                reset_peak(device)

    def read(self, phase: str) -> None:
        """Read all devices at the end of a phase; of several readings of one phase the largest counts."""
        for device in self.devices:
            # Only the resident set of a CPU's process is quick to read.
            if device.type == "cpu":
                new = Reading(resident_bytes())
            else:
                reading = read_memory(device)
                new = Reading(reading.allocated, reading.reserved, reading.peak)
            key = (str(device), phase)
            self._read[key] = larger(self._read.get(key), new)
        self.reset()

    def take(self) -> ByPhase:
        """Return the readings since the last call."""
        readings = self._read
        self._read = {}
        return readings


def larger(before: Reading | None, now: Reading) -> Reading:
    """Return the larger of two readings, value by value."""
    if before is None:
        return now
    return Reading(
        allocated=max(before.allocated, now.allocated),
        reserved=_larger_value(before.reserved, now.reserved),
        peak=_larger_value(before.peak, now.peak),
    )


def _larger_value(before: int | None, now: int | None) -> int | None:
    return max((value for value in (before, now) if value is not None), default=None)


def by_device(readings: ByPhase) -> dict[str, int]:
    """Return the largest memory of each device in any phase, in bytes."""
    most: dict[str, int] = defaultdict(int)
    for (device, _), reading in readings.items():
        most[device] = max(most[device], reading.allocated, reading.peak or 0)
    return dict(most)


def metrics_of(readings: ByPhase) -> dict[str, float]:
    """Return readings in MiB by the names that loggers receive."""
    metrics = {}
    for (device, phase), reading in readings.items():
        for name, value in reading._asdict().items():
            if value is not None:
                key = f"memory/{device}/{phase}/{name}_MiB"
                key = key.replace(" ", "_")
                metrics[key] = to_mib(value)
    return metrics


def to_mib(nbytes: int) -> float:
    """Convert bytes to MiB, rounded as in the logs."""
    return round(nbytes / 2**20, 3)


def points_of(readings: ByPhase, step: int, seconds: float) -> Iterator[MemoryPoint]:
    """Yield the readings as points of a time line."""
    for (device, phase), reading in readings.items():
        yield MemoryPoint(step=step, seconds=seconds, device=device, phase=phase, **reading._asdict())


def thin_out(timeline: list[MemoryPoint]) -> None:
    """Drop every other moment of the older half of a time line that is too long."""
    if len(timeline) <= _MOST_POINTS:
        return
    # Points of one moment stay together.
    middle = _MOST_POINTS // 2
    older = timeline[:middle]
    moments = sorted({point.seconds for point in older})
    remaining = set(moments[::2])
    timeline[:middle] = [point for point in older if point.seconds in remaining]


def with_largest(largest: list[Composition], new: Composition, phase: str | None = None) -> list[Composition]:
    """Return a list in which a new composition replaces a smaller one of the same device and phase.

    Args:
        largest: The largest compositions so far.
        new: The new composition.
        phase: Phase that both must have. Default: any phase.
    """
    for index, old in enumerate(largest):
        if old.device != new.device or phase not in (None, old.phase):
            continue
        if new.nbytes <= old.nbytes:
            return list(largest)
        return [*largest[:index], new, *largest[index + 1 :]]
    return [*largest, new]
