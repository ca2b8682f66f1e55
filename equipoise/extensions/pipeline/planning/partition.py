"""Choose where the network is cut: stages of balanced time within the memory of their devices.

A dynamic programme over the ends of stages, exact for a given order of devices. Its cost is the time of the slowest
stage, with the exchange of what passes. Among cuts whose times differ by less than measuring can tell, it is the bytes
that pass between stages. Devices may be of unequal speed and memory, and so may the links between them (the problem of
Narayanan et al., "PipeDream", 2019).

First the programme runs without a limit of memory: if that cut fits, it is the best one. Otherwise each stage gets a
part of its device's memory, and the programme runs again: at first with equal parts, then in the ratio of what the
stages of the previous cut need. With several stages on a device, whose memory depends on one another, a quicker cut
that fits may exist, and a search without a result does not prove that none fits.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from equipoise.extensions.pipeline.planning.stage_costs import Costs

__all__ = ["DoesNotFit", "NoCut", "choose_cuts"]

# Cuts whose slowest stages differ by no more than this factor are equally good.
_TOLERANCE = 1.01
# Number of attempts to divide a device's memory between its stages.
_ROUNDS = 8


class NoCut(ValueError):
    """There are more stages than places between which a cut is allowed."""


class DoesNotFit(Exception):
    """No cut fits into the devices' memory.

    Attributes:
        best: The cut whose stages overrun their memory least.
    """

    def __init__(self, best: Sequence[int]) -> None:
        super().__init__("no cut fits")
        self.best = list(best)


def choose_cuts(costs: Costs) -> list[int]:
    """Choose the blocks with which stages end.

    Args:
        costs: Costs of the blocks in stages. All stages of a device share its memory.

    Returns:
        For each stage the index of the block after its last.

    Raises:
        NoCut: If there are more stages than blocks between which a cut is allowed.
        DoesNotFit: If no cut fits into memory; with several stages on a device, if none was found.

    Example:
        >>> from equipoise.extensions.pipeline.planning.stage_costs import Block, StageDevice
        >>> blocks = [Block(name=str(index), forward=seconds) for index, seconds in enumerate([1, 1, 1, 3])]
        >>> choose_cuts(Costs(blocks, [StageDevice(), StageDevice()]))
        [3, 4]
    """
    stages = len(costs.devices)
    # 1. Try without a limit of memory.
    attempts = [_cut(costs.with_memory([None] * stages))]

    # 2. Divide each device's memory between its stages until a cut fits, or a division comes up once more.
    parts = [costs.num_devices / stages] * stages
    divisions: list[list[float]] = []
    while _overrun(costs, attempts[-1]) > 0 and parts not in divisions and len(divisions) < _ROUNDS:
        divisions.append(parts)
        memory = []
        for device, part in zip(costs.devices, parts, strict=True):
            limit = None
            if device.memory is not None:
                limit = int(part * device.memory)
            memory.append(limit)
        cuts = _cut(costs.with_memory(memory))
        attempts.append(cuts)
        parts = _parts_by_need(costs, cuts)

    # 3. Take the first cut that fits, or the one that overruns memory least.
    best = min(attempts, key=lambda attempt: _overrun(costs, attempt))
    if _overrun(costs, best) > 0:
        raise DoesNotFit(best)
    return best


def _cut(costs: Costs) -> list[int]:
    """Return the best cut, each stage by itself within its limit of memory, or the one that overruns it least."""
    # 1. Find the time of the slowest stage.
    _, cost = _best(costs)
    # 2. Among the cuts that are about as fast, find the one that passes the fewest bytes between stages.
    cuts, _ = _best(costs, _TOLERANCE * cost.slowest)
    return cuts


def _parts_by_need(costs: Costs, cuts: Sequence[int]) -> list[float]:
    """Return for each stage its part of the memory that the stages of its device need together."""
    sizes = [stage.memory for stage in costs.stages(cuts)]
    parts = []
    for index, size in enumerate(sizes):
        device = index % costs.num_devices
        total = sum(sizes[device :: costs.num_devices])
        parts.append(size / max(1, total))
    return parts


def _overrun(costs: Costs, cuts: Sequence[int]) -> float:
    """Return the share of its memory by which the worst device is overrun; 0 if all fit."""
    worst = 0.0
    # The first stages have one device each. The devices repeat for the stages after them.
    peaks = costs.peaks(costs.stages(cuts))
    for peak, device in zip(peaks, costs.devices, strict=False):
        if device.memory is not None:
            worst = max(worst, _overrun_of_memory(device.memory, peak))
    return worst


def _overrun_of_memory(memory: int, nbytes: int) -> float:
    """Return the share of a memory by which it is overrun; negative if the bytes fit."""
    return nbytes / max(1, memory) - 1


# The dynamic programme.


class _Cost(NamedTuple):
    """Cost of the stages up to an end. The first attribute in which two costs differ decides.

    Attributes:
        overrun: Share of its memory by which the worst device is overrun.
        slowest: Seconds of the slowest stage.
        passing: Bytes that pass between stages.
    """

    overrun: float
    slowest: float
    passing: int


class _LastStage(NamedTuple):
    """Best last stage of a partition."""

    cost: _Cost
    first: int


# By the end of a stage, the index of the block after its last.
_Row = dict[int, _LastStage]


def _best(costs: Costs, enough: float = 0.0) -> tuple[list[int], _Cost]:
    """Return the best ends of all stages, and their cost.

    Args:
        costs: Costs of stages.
        enough: Seconds of the slowest stage below which a partition does not become better. Default: 0.

    Raises:
        NoCut: If there are more stages than blocks between which a cut is allowed.
    """
    blocks = costs.blocks
    stages = len(costs.devices)
    last_end = len(blocks)

    # 1. For each number of stages and each end, find the best partition of the blocks before that end.
    no_cost = _Cost(overrun=0.0, slowest=0.0, passing=0)
    rows: list[_Row] = [{0: _LastStage(no_cost, first=0)}]
    for stage in range(stages):
        row: _Row = {}
        hint = None
        first_end = stage + 1
        if stage == stages - 1:
            first_end = last_end
        for end in range(first_end, last_end + 1):
            if not blocks[end - 1].may_end and end != last_end:
                continue
            last_stage = _best_beginning(costs, stage, end, rows[stage], enough, hint)
            if last_stage is not None:
                row[end] = last_stage
                # Stages that end a block later often begin with the same block.
                hint = last_stage.first
        rows.append(row)
    if last_end not in rows[stages]:
        raise NoCut(f"{stages} stages need as many blocks, and places to cut between them; there are {last_end}.")

    # 2. Follow the beginnings back from the last stage.
    cuts = []
    end = last_end
    for stage in range(stages, 0, -1):
        cuts.append(end)
        end = rows[stage][end].first
    cuts.reverse()
    return cuts, rows[stages][last_end].cost


def _best_beginning(
    costs: Costs,
    stage: int,
    end: int,
    before: _Row,
    enough: float,
    hint: int | None,
) -> _LastStage | None:
    """Return where a stage with this end best begins, and the cost up to its end; None if it cannot begin anywhere.

    Args:
        costs: Costs of stages.
        stage: Index of the stage.
        end: Index of the block after its last.
        before: Results for the stage before.
        enough: See `_best`.
        hint: A likely beginning. It is tried first, so that worse ones are soon passed over.
    """
    memory = costs.devices[stage].memory
    boundary = 0
    if end < len(costs.blocks):
        boundary = costs.blocks[end - 1].boundary
    # From short stages to long ones.
    candidates = list(range(end - 1, stage - 1, -1))
    if hint is not None:
        candidates.insert(0, hint)

    best: _LastStage | None = None
    # Seconds of the slowest stage of the best partition, once that one fits into memory.
    limit = math.inf
    for first in candidates:
        if first not in before:
            continue
        earlier = before[first].cost
        if earlier.slowest > limit or (earlier.overrun and limit < math.inf):
            continue
        seconds = costs.seconds(stage, first, end)
        if max(seconds, enough) > limit:
            # All stages after this one in the list are longer, and compute longer.
            break
        seconds += costs.exchange(stage, first, end)
        seconds = max(seconds, enough)
        if seconds > limit:
            continue

        # Compare without the memory of this stage first: to price it takes longer.
        cost = _Cost(
            overrun=earlier.overrun,
            slowest=max(earlier.slowest, seconds),
            passing=earlier.passing + boundary,
        )
        if best is not None and cost >= best.cost:
            # Memory can only raise the cost.
            continue
        if memory is not None:
            least_overrun = _overrun_of_memory(memory, costs.least_memory(stage, first, end))
            if best is not None and least_overrun > best.cost.overrun:
                # All stages after this one in the list are longer, and need no less.
                break
            overrun = _overrun_of_memory(memory, costs.stage(stage, first, end).memory)
            cost = cost._replace(overrun=max(cost.overrun, overrun))
        if best is None or cost < best.cost:
            best = _LastStage(cost, first)
            if not cost.overrun:
                limit = cost.slowest
    return best
