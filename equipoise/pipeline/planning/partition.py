"""Partition a sequence of blocks into stages: the slowest as fast as possible, each within its memory.

A dynamic programme over the ends of stages, exact for a given order of devices: its cost is the time of the slowest
stage and, among cuts that are as good to within what measuring can tell, the bytes that pass between stages. Devices
may be of unequal speed and memory (the problem of Narayanan et al., "PipeDream", 2019, for one machine).

Where a device has several stages they share its memory, and what one may take depends on the others. The cut that is
chosen as if memory had no limit is the best one if it fits. Otherwise each stage gets a part of its device's memory, at
first equal parts, then in the ratio of what the stages of the cut before need, and the programme runs again. So a
cut that is returned fits, but may not be the quickest of those that do; and where none is found there may be one.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from equipoise.pipeline.planning.stage_costs import Block, Costs, Stage, StageDevice
from equipoise.pipeline.schedule.schedule import Schedule

__all__ = ["DoesNotFit", "choose_cuts", "describe_stages"]

_ALIKE = 1.01  # cuts whose slowest stages differ by no more are as good as one another
_ROUNDS = 8  # in which a device's memory is divided between its stages


class DoesNotFit(Exception):
    """No cut fits into the devices' memory.

    Attributes:
        best: The cut whose stages overrun their memory least.
    """

    def __init__(self, best: Sequence[int]) -> None:
        super().__init__("no cut fits")
        self.best = list(best)


def choose_cuts(
    blocks: Sequence[Block],
    devices: Sequence[StageDevice],
    *,
    schedule: Schedule = "1f1b",
    micro_batches: int = 1,
    stages_per_device: int = 1,
    state_factor: float = 3.0,
) -> list[int]:
    """Chooses the blocks with which stages end.

    Args:
        blocks: The blocks, in order.
        devices: One for each stage, in order. Of p devices, each with several stages, stage s has that of stage s - p,
            and its memory is that of all of them together.
        schedule: How micro-batches are computed; it decides how many activations a stage holds.
        micro_batches: Their number.
        stages_per_device: How many stages each device has. Default: 1.
        state_factor: Bytes of gradients and the optimiser's state for each byte of a trained parameter. Default: 3,
            which is Adam's; 1 are the gradients.

    Returns:
        For each stage the index of the block after its last.

    Raises:
        ValueError: If there are more stages than places to cut.
        DoesNotFit: If no cut fits into memory; with several stages on a device, if none was found.

    Example:
        >>> blocks = [Block(name=str(index), forward=seconds) for index, seconds in enumerate([1, 1, 1, 3])]
        >>> choose_cuts(blocks, [StageDevice(), StageDevice()])
        [3, 4]
    """
    costs = Costs(blocks, devices, schedule, micro_batches, stages_per_device, state_factor)
    cuts = _cut_looped(costs, stages_per_device) if stages_per_device > 1 else _cut(costs)
    if cuts is None:
        raise ValueError(
            f"{len(devices)} stages need as many blocks, and places to cut between them; there are {len(blocks)}."
        )
    if _overrun(costs, costs.devices, cuts) > 0:
        raise DoesNotFit(cuts)
    return cuts


def describe_stages(
    blocks: Sequence[Block],
    devices: Sequence[StageDevice],
    cuts: Sequence[int],
    *,
    schedule: Schedule = "1f1b",
    micro_batches: int = 1,
    stages_per_device: int = 1,
    state_factor: float = 3.0,
) -> tuple[list[Stage], list[int]]:
    """What the stages of a cut come to, and for each device the bytes at its peak; see `choose_cuts`."""
    costs = Costs(blocks, devices, schedule, micro_batches, stages_per_device, state_factor)
    stages = costs.stages(cuts)
    return stages, costs.peaks(stages)


def _cut(costs: Costs) -> list[int] | None:
    """The best cut, each stage by itself within its device's memory, or the one that overruns it least."""
    _, (_, slowest, _) = _best(costs)
    return _best(costs, _ALIKE * slowest)[0]


def _cut_looped(costs: Costs, stages_per_device: int) -> list[int] | None:
    """A good cut where the stages of a device share its memory; see above."""
    devices, count = costs.devices, len(costs.devices) // stages_per_device
    try:
        costs.devices = [replace(device, memory=None) for device in devices]
        found = [_cut(costs)]
        parts = [1 / stages_per_device] * len(devices)
        while (last := found[-1]) and _overrun(costs, devices, last) > 0 and len(found) <= _ROUNDS:
            if len(found) > 1:
                sizes = [stage.memory for stage in costs.stages(last)]
                parts = [size / max(1, sum(sizes[index % count :: count])) for index, size in enumerate(sizes)]
            costs.devices = [
                replace(device, memory=None if device.memory is None else int(part * device.memory))
                for device, part in zip(devices, parts, strict=True)
            ]
            found.append(_cut(costs))
    finally:
        costs.devices = devices
    return min((cuts for cuts in found if cuts), key=lambda cuts: _overrun(costs, devices, cuts), default=None)


def _overrun(costs: Costs, devices: Sequence[StageDevice], cuts: Sequence[int]) -> float:
    """By which share of its memory the worst device is overrun."""
    peaks = costs.peaks(costs.stages(cuts))
    return max(
        0.0 if device.memory is None else max(0.0, peak / max(1, device.memory) - 1)
        for peak, device in zip(peaks, devices, strict=False)
    )


Cost = tuple[float, float, int]  # bytes beyond the memory, as a share of it; seconds of the slowest; bytes that pass


def _best(costs: Costs, enough: float = 0.0) -> tuple[list[int] | None, Cost]:
    """The best ends of all stages, and their cost; a slowest stage of `enough` seconds is as good as a quicker one."""
    blocks, stages = costs.blocks, len(costs.devices)
    count = len(blocks)
    best: list[dict[int, tuple[Cost, int]]] = [{0: ((0.0, 0.0, 0), 0)}]  # by stages so far, then by blocks so far
    for stage in range(stages):
        row: dict[int, tuple[Cost, int]] = {}
        hint = None
        for end in range(stage + 1, count + 1) if stage < stages - 1 else (count,):
            if blocks[end - 1].may_end or end == count:
                found = _best_beginning(costs, stage, end, best[stage], enough, hint)
                if found is not None:
                    row[end], hint = found, found[1]
        best.append(row)
    if count not in best[stages]:
        return None, (math.inf, math.inf, 0)
    cuts, end = [], count
    for stage in range(stages, 0, -1):
        cuts.append(end)
        end = best[stage][end][1]
    return cuts[::-1], best[stages][count][0]


def _best_beginning(
    costs: Costs, stage: int, end: int, before: dict[int, tuple[Cost, int]], enough: float, hint: int | None
) -> tuple[Cost, int] | None:
    """Where a stage that ends somewhere best begins, and the cost up to its end.

    Args:
        costs: What stages cost.
        stage: The stage.
        end: Its end.
        before: For the ends of the stage before the costs up to them.
        enough: See `_best`.
        hint: Where it may well begin: what is known to be worse than that is soon passed over.
    """
    blocks, device, best = costs.blocks, costs.devices[stage], None
    passing = 0 if end == len(blocks) else blocks[end - 1].boundary
    for first in (*([] if hint is None else [hint]), *range(end - 1, stage - 1, -1)):
        if first not in before:
            continue
        over, slowest, passed = before[first][0]
        if best is not None and not best[0][0] and (over or slowest > best[0][1]):
            continue
        seconds = max(costs.seconds(stage, first, end), enough)
        if best is not None and not best[0][0] and seconds > best[0][1]:
            break  # what is longer takes longer
        cost = (over, max(slowest, seconds), passed + passing)
        if best is not None and cost >= best[0]:
            continue  # whatever its memory
        if device.memory is not None:
            cost = (max(over, costs.stage(stage, first, end).memory / max(1, device.memory) - 1), *cost[1:])
        if best is None or cost < best[0]:
            best = cost, first
    return best
