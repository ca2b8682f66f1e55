"""Memory readings of all devices of a process, by phase of a step."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

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

Reading = tuple[int, int | None, int | None]  # allocated, reserved, peak
ByPhase = dict[tuple[str, str], Reading]  # by device and phase

_MOST_POINTS = 20_000


class Readings:
    """Reads devices at the end of phases.

    Args:
        devices: The devices.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = list(devices)
        self._read: ByPhase = {}

    def reset(self) -> None:
        """A phase begins: peaks begin anew. That of a CPU is not read: it belongs to the system, and takes long."""
        for device in self.devices:
            if device.type == "cuda":
                reset_peak(device)

    def read(self, phase: str) -> None:
        """A phase ends; of several readings of one phase the largest counts."""
        for device in self.devices:
            if device.type == "cpu":
                new: Reading = (resident_bytes(), None, None)
            else:
                reading = read_memory(device)
                new = (reading.allocated, reading.reserved, reading.peak)
            key = (str(device), phase)
            self._read[key] = larger(self._read.get(key), new)
        self.reset()

    def take(self) -> ByPhase:
        """What was read since this was last called."""
        taken, self._read = self._read, {}
        return taken


def larger(before: Reading | None, now: Reading) -> Reading:
    """The larger of two readings, value by value."""
    if before is None:
        return now
    allocated, reserved, peak = (
        a if b is None else b if a is None else max(a, b) for a, b in zip(before, now, strict=True)
    )
    return allocated or 0, reserved, peak


def by_device(readings: ByPhase) -> dict[str, int]:
    """The most that each device held in any phase, in bytes."""
    most: dict[str, int] = defaultdict(int)
    for (device, _), (allocated, _, peak) in readings.items():
        most[device] = max(most[device], allocated, peak or 0)
    return dict(most)


def metrics_of(readings: ByPhase) -> dict[str, float]:
    """What loggers receive, in MiB."""
    return {
        f"memory/{device}/{phase}/{name}_MiB".replace(" ", "_"): to_mib(value)
        for (device, phase), reading in readings.items()
        for name, value in zip(("allocated", "reserved", "peak"), reading, strict=True)
        if value is not None
    }


def to_mib(nbytes: int) -> float:
    """Bytes in MiB, as they are logged."""
    return round(nbytes / 2**20, 3)


def points_of(readings: ByPhase, step: int, seconds: float) -> Iterator[MemoryPoint]:
    """The readings as points of a time line."""
    for (device, phase), (allocated, reserved, peak) in readings.items():
        yield MemoryPoint(
            step=step,
            seconds=seconds,
            device=device,
            phase=phase,
            allocated=allocated,
            reserved=reserved,
            peak=peak,
        )


def thin_out(timeline: list[MemoryPoint]) -> None:
    """Drops every other moment of the older half where there are very many."""
    if len(timeline) > _MOST_POINTS:
        half = timeline[: _MOST_POINTS // 2]
        kept = set(sorted({point.seconds for point in half})[::2])
        timeline[: _MOST_POINTS // 2] = [point for point in half if point.seconds in kept]


def with_largest(kept: list[Composition], new: Composition, phase: str | None = None) -> list[Composition]:
    """The list with a composition in the place of a smaller one of the same device, and phase if one is given."""
    for index, old in enumerate(kept):
        if old.device == new.device and phase in (None, old.phase):
            return [*kept[:index], max(old, new, key=lambda one: one.nbytes), *kept[index + 1 :]]
    return [*kept, new]
