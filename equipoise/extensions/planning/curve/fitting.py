"""Two records of a step at different batch sizes, made one curve: the same events, and a size for each storage."""

from dataclasses import dataclass

from equipoise.extensions.planning.curve.curve import MemoryCurve
from equipoise.extensions.planning.curve.parts import Holder, PhaseStart
from equipoise.extensions.planning.curve.sizes import Size, Span, is_proportional, size_between
from equipoise.memory.profile.ledger import LedgerEvent
from equipoise.memory.records import TensorRecord

__all__ = ["IrregularStepError", "RecordedStep", "fit_curve", "needs_confirmation", "reproduces"]


class IrregularStepError(Exception):
    """A step does something else with another batch size, so that no curve goes through its records."""


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """A step that a ledger has recorded.

    Attributes:
        batch_size: Its batch size.
        records: Its storages, in the order of their allocation.
        events: Their allocations and releases, in order.
        starts: The beginnings of its phases, in order.
    """

    batch_size: int
    records: list[TensorRecord]
    events: list[LedgerEvent]
    starts: list[PhaseStart]


def fit_curve(first: RecordedStep, second: RecordedStep) -> MemoryCurve:
    """Return the curve through two records of a step.

    Args:
        first: The record with the smaller batch.
        second: The record with the larger one.

    Raises:
        IrregularStepError: If the steps have different events.
    """
    # 1. The events must be the same; what they concern may have another size.
    if first.events != second.events or first.starts != second.starts:
        raise IrregularStepError(
            f"a step with {first.batch_size} samples and one with {second.batch_size} do different things"
        )

    # 2. The size of each storage. Most of them have one of a few sizes.
    span = Span(first.batch_size, second.batch_size)
    indices: dict[Size, int] = {}
    holders = []
    for record, other in zip(first.records, second.records, strict=True):
        index = indices.setdefault(size_between(record, other), len(indices))
        holders.append(Holder(record.category, record.module, index))

    # 3. The events as numbers.
    events = []
    for event in first.events:
        name = event.holder + 1
        # The sign tells a release.
        if not event.is_allocation:
            name = -name
        events.append(name)

    # 4. What exists before the first phase belongs to it.
    begin, *others = first.starts
    phases = [PhaseStart(begin.phase, 0), *others]
    return MemoryCurve(
        span=span,
        sizes=list(indices),
        holders=holders,
        events=events,
        phases=phases,
    )


def needs_confirmation(curve: MemoryCurve) -> bool:
    """Return True if a length is no multiple of the batch size, so that a third record must confirm the curve."""
    return not all(is_proportional(size, curve.span) for size in curve.sizes)


def reproduces(curve: MemoryCurve, recorded: RecordedStep) -> bool:
    """Return True if a curve gives the bytes of every storage of another record."""
    if len(recorded.records) != len(curve.holders):
        return False
    for holder, record in zip(curve.holders, recorded.records, strict=True):
        size = curve.sizes[holder.size]
        if size.at(recorded.batch_size, curve.span) != record.nbytes:
            return False
    return True
