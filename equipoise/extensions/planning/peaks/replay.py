"""A recorded step replayed with the bytes and the shares that a device has of it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from equipoise.extensions.common.device_loads import DeviceLoad, Part
from equipoise.extensions.planning.peaks.recorded_step import PhaseStart
from equipoise.memory.records import CATEGORIES

__all__ = ["Integers", "PredictedPeak", "Replay", "numbers_of"]

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

# The parts by number; the last two exist under several devices only.
_PARTS: tuple[Part, ...] = (*CATEGORIES, "bucket", "copy")


@dataclass(frozen=True, kw_only=True)
class PredictedPeak:
    """Predicted peak of one device.

    Attributes:
        nbytes: Bytes at the peak.
        phase: The phase of the peak.
        parts: Bytes by kind, the largest first: "parameter", "gradient", "optimizer state", "activation",
            "temporary", "batch", "buffer"; under several devices also "bucket" and "copy".
        phases: The peak of each phase in bytes.
    """

    nbytes: int
    phase: str
    parts: Mapping[Part, int]
    phases: Mapping[str, int]


class _Moment(NamedTuple):
    """Moment of a phase's peak.

    Attributes:
        nbytes: Bytes of the device.
        event_count: Number of events up to it.
        follows_event: False at the beginning of the phase, which the bytes of no event reach.
    """

    nbytes: int
    event_count: int
    follows_event: bool


def numbers_of(parts: Sequence[Part]) -> Integers:
    """Return parts as the numbers that `Replay` takes."""
    return np.array([_PARTS.index(part) for part in parts], dtype=np.int64)


class Replay:
    """Replays the events of a step, with the share of each that a device has.

    Steps of large models have tens of thousands of events, and a search replays them often, so this is done by arrays.

    Args:
        categories: The number of the part of each event; see `numbers_of`.
        changes: Bytes that each event allocates, or frees if negative, on one device that computes the whole step.
        starts: The beginnings of the phases, in order.
        load: The part of the step that the device has.
    """

    def __init__(
        self,
        categories: Integers,
        changes: Integers,
        starts: Sequence[PhaseStart],
        load: DeviceLoad,
    ) -> None:
        self._starts = starts
        self._load = load
        self._categories = categories
        self._changes = changes
        # For each part.
        self._are_momentary = np.array([part in load.momentary for part in _PARTS])

    def peak(self) -> PredictedPeak:
        """Return the peak of all phases."""
        # 1. The peak of each phase.
        moments: dict[str, _Moment] = {}
        ends = [start.event for start in self._starts[1:]]
        ends.append(len(self._changes))
        for start, end in zip(self._starts, ends, strict=True):
            moment = self._peak_of_phase(start, end)
            # A window of several batches has a phase several times.
            if start.phase not in moments or moment.nbytes > moments[start.phase].nbytes:
                moments[start.phase] = moment

        # 2. The largest of them, and its parts.
        largest = max(moments, key=lambda phase: moments[phase].nbytes)
        return PredictedPeak(
            nbytes=moments[largest].nbytes,
            phase=largest,
            parts=self._parts(largest, moments[largest]),
            phases={phase: moment.nbytes for phase, moment in moments.items()},
        )

    def _peak_of_phase(self, start: PhaseStart, end: int) -> _Moment:
        """Return the peak of a phase, which may be its beginning."""
        # 1. The bytes at the beginning.
        factors = self._factors(start.phase)
        of_step = factors @ self._bytes_alive_after(start.event)
        before = float(of_step) + self._load.added(start.phase)

        # 2. The bytes after each event, with those that exist for a moment.
        changes = self._changes[start.event : end]
        categories = self._categories[start.event : end]
        shares = factors[categories]
        present = before + np.cumsum(shares * changes)
        exist_for_a_moment = self._are_momentary[categories] & (changes > 0)
        # The part that the device does not hold otherwise.
        present += np.where(exist_for_a_moment, (1 - shares) * changes, 0)

        # 3. The first of the largest.
        position = -1
        most = before
        # A phase without events has the bytes of its beginning.
        if len(present) and present.max() > before:
            position = int(present.argmax())
            most = float(present[position])
        return _Moment(round(most), start.event + position + 1, follows_event=position >= 0)

    def _factors(self, phase: str) -> Floats:
        """Return the share of each category that the device holds."""
        factors = [self._load.factor(category, phase) for category in CATEGORIES]
        # The device has the others for itself.
        factors += [1.0] * (len(_PARTS) - len(CATEGORIES))
        return np.array(factors, dtype=np.float64)

    def _bytes_alive_after(self, event_count: int) -> Floats:
        """Return the bytes of each part after a number of events."""
        categories = self._categories[:event_count]
        changes = self._changes[:event_count]
        return np.bincount(categories, weights=changes, minlength=len(_PARTS)).astype(np.float64)

    def _parts(self, phase: str, moment: _Moment) -> dict[Part, int]:
        """Return the bytes of each part at a moment, the largest first."""
        # 1. The storages.
        parts: dict[Part, int] = defaultdict(int)
        factors = self._factors(phase)
        alive = factors * self._bytes_alive_after(moment.event_count)
        for part, nbytes in zip(_PARTS, alive.tolist(), strict=True):
            parts[part] = round(nbytes)
        if moment.follows_event:
            newest = int(self._categories[moment.event_count - 1])
            nbytes = int(self._changes[moment.event_count - 1])
            if self._are_momentary[newest] and nbytes > 0:
                # The part of it that the device does not hold otherwise.
                parts[_PARTS[newest]] += round(float((1 - factors[newest]) * nbytes))

        # 2. The memory that the device has beside them.
        for addition in self._load.additions:
            if addition.is_in(phase):
                parts[addition.part] += addition.nbytes
        present = [(part, nbytes) for part, nbytes in parts.items() if nbytes]
        present.sort(key=lambda item: -item[1])
        return dict(present)
