"""Runs all contestants in shuffled rounds, each side by side with the hand-written loop, and keeps the differences."""

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import NamedTuple

from frameworks import Contestant
from workload import Batch, Size, TimedBatches

__all__ = ["BY_HAND", "NOISE", "Entry", "Row", "measure"]

Pair = tuple[float, float]
BY_HAND, NOISE = "by hand", "by hand, again"
DISTURBED = 1.25
"""A run that took so many times the quickest of its kind was disturbed by whoever else uses the machine: left out."""


class Entry(NamedTuple):
    """A contestant and what it is compared with.

    Attributes:
        group: "training", "samples", "accumulation" or "evaluation": rows of a group share a hand-written loop.
        name: The framework, or `BY_HAND`, or `NOISE`.
        load: What it does.
        run: Does it.
    """

    group: str
    name: str
    load: str
    run: Contestant


@dataclass(frozen=True)
class Row:
    """Result of one contestant. Times are processor time in microseconds per step.

    Attributes:
        group, name, load: Those of the entry.
        time: The median of its times.
        over: The median of its differences to the hand-written loop beside it.
        low, high: Their quartiles.
        ratio: The median of its ratios to the hand-written loop.
        rounds: Undisturbed rounds, of which these are the medians.
    """

    group: str
    name: str
    load: str
    time: float
    over: float
    low: float
    high: float
    ratio: float
    rounds: int = 1


def measure(
    entries: list[Entry], batches: list[Batch], *, size: Size, rounds: int, seed: int, report: Callable[[int], None]
) -> list[Row]:
    """Times all entries, in an order that is shuffled anew in every round.

    The hand-written loop runs once for each of the others, right before or right after it, as the dice fall: the speed
    of a machine drifts, but little from one second to the next.

    Args:
        entries: Who takes part; every group needs its `BY_HAND`.
        batches: What all of them compute on.
        size: How long each measurement is.
        rounds: How often everything is measured.
        seed: Of the shuffling.
        report: Told the number of each round that is done.
    """
    hand = {entry.group: entry for entry in entries if entry.name == BY_HAND}
    others = [entry for entry in entries if entry.name != BY_HAND]

    # 1. The pairs of times.
    try:
        pairs = _pairs(others, hand, batches, size=size, rounds=rounds, seed=seed, report=report)
    finally:
        gc.unfreeze()

    # 2. A row for each entry, from its undisturbed pairs.
    references: dict[str, list[float]] = {group: [] for group in hand}
    for entry in others:
        references[entry.group] += [by_hand for _, by_hand in pairs[entry]]
    rows = [_hand_row(entry, references[group]) for group, entry in hand.items()]
    for entry in others:
        undisturbed = _undisturbed(pairs[entry], min(references[entry.group]))
        rows.append(_row(entry, undisturbed))
    return rows


def _pairs(
    others: list[Entry],
    hand: dict[str, Entry],
    batches: list[Batch],
    *,
    size: Size,
    rounds: int,
    seed: int,
    report: Callable[[int], None],
) -> dict[Entry, list[Pair]]:
    """Return the times of each entry, and of the hand-written loop beside it. See `measure`."""
    pairs: dict[Entry, list[Pair]] = {entry: [] for entry in others}
    order = list(others)
    dice = random.Random(seed)
    for done in range(1, rounds + 1):
        dice.shuffle(order)
        for entry in order:
            both = [entry, hand[entry.group]]
            dice.shuffle(both)
            times = {one: _time(one, batches, size) for one in both}
            pairs[entry].append((times[entry], times[hand[entry.group]]))
        report(done)
    return pairs


def _time(entry: Entry, batches: list[Batch], size: Size) -> float:
    """Return the time of one run.

    The collector of garbage stays on, as it is for users, but passes over all earlier objects. They stay set aside
    until the last run ends: to collect them anew before each run would take longer than a short run.
    """
    gc.collect()
    gc.freeze()
    data = TimedBatches(batches, size)
    entry.run(data)
    return data.microseconds_per_step


def _undisturbed(pairs: list[Pair], reference: float) -> list[Pair]:
    """The pairs in which neither run was slowed down; all of them if that leaves none.

    Args:
        pairs: The times of a contestant, and of the hand-written loop beside it.
        reference: The quickest run of the hand-written loop.
    """
    quickest = min(time for time, _ in pairs)
    calm = [pair for pair in pairs if pair[0] <= DISTURBED * quickest and pair[1] <= DISTURBED * reference]
    return calm or pairs


def _hand_row(entry: Entry, times: list[float]) -> Row:
    times = [time for time in times if time <= DISTURBED * min(times)]
    return Row(entry.group, entry.name, entry.load, median(times), 0.0, 0.0, 0.0, 1.0, len(times))


def _row(entry: Entry, pairs: list[Pair]) -> Row:
    differences = [time - reference for time, reference in pairs]
    low, _, high = quantiles(differences, method="inclusive") if len(differences) > 1 else differences * 3
    ratio = median(time / reference for time, reference in pairs)
    return Row(
        entry.group,
        entry.name,
        entry.load,
        median(time for time, _ in pairs),
        median(differences),
        low,
        high,
        ratio,
        len(pairs),
    )
