"""A recorded step: its storages, their allocations and releases, and its phases."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from equipoise.memory.records import Category

__all__ = ["Holder", "PhaseStart", "RecordedStep"]


class Holder(NamedTuple):
    """Storage of a recorded step.

    Attributes:
        category: Its category.
        module: Name of the module that it belongs to, or that created it.
        nbytes: Its bytes.
    """

    category: Category
    module: str
    nbytes: int


class PhaseStart(NamedTuple):
    """Beginning of a phase.

    Attributes:
        phase: "forward", "backward" or "optimizer step".
        event: Number of the events before it.
    """

    phase: str
    event: int


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """A step that a ledger has recorded.

    Attributes:
        batch_size: Samples of its batch.
        holders: The storages, in the order of their allocation.
        events: Allocations and releases in order: a positive number n allocates holder n - 1, a negative one releases
            it.
        phases: The phases in order.
    """

    batch_size: int
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

    def totals(self) -> Mapping[Category, int]:
        """Return the bytes that are alive at the end, by category."""
        alive = {abs(event) - 1: event > 0 for event in self.events}
        totals: dict[Category, int] = defaultdict(int)
        for index, is_alive in alive.items():
            if is_alive:
                totals[self.holders[index].category] += self.holders[index].nbytes
        return totals
