"""Parts of a recorded step, and the peak that follows from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from equipoise.extensions.common.device_loads import Part
from equipoise.memory.records import Category

__all__ = ["Holder", "PhaseStart", "PredictedPeak", "StepTrace"]


class Holder(NamedTuple):
    """Storage of a recorded step.

    Attributes:
        category: Its category.
        module: Name of the module that it belongs to, or that created it.
        size: Index of its size among those of the curve.
    """

    category: Category
    module: str
    size: int


class PhaseStart(NamedTuple):
    """Beginning of a phase.

    Attributes:
        phase: "forward", "backward" or "optimizer step".
        event: Number of the events before it.
    """

    phase: str
    event: int


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """A recorded step.

    Attributes:
        holders: The storages, in the order of their allocation.
        events: Allocations and releases in order: a positive number n allocates holder n - 1, a negative one releases
            it.
        phases: The phases in order.
    """

    holders: Sequence[Holder]
    events: Sequence[int]
    phases: Sequence[PhaseStart]

    def events_of(self, position: int) -> Sequence[int]:
        """Return the events of the phase at a position; none if there is no such phase."""
        if position >= len(self.phases):
            return ()
        following = position + 1
        begin = self.phases[position].event
        end = len(self.events)
        if following < len(self.phases):
            end = self.phases[following].event
        return self.events[begin:end]


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
