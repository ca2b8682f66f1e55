"""Where to cut a sequence of blocks into stages, so that the slowest is as quick as can be and every one fits.

A dynamic programme over the ends of stages, exact for a given order of devices: its cost is the time of the slowest
stage and, among cuts that are as good to within what measuring can tell, the bytes that pass between stages. Devices
may be of unequal speed and memory (the problem of Narayanan et al., "PipeDream", 2019, for one machine).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from equipoise.parallel.schedule import Schedule, in_flight

__all__ = ["Block", "DoesNotFit", "Stage", "StageDevice", "choose_cuts", "describe_stages"]

_ALIKE = 1.01  # cuts whose slowest stages differ by no more are as good as one another


@dataclass(frozen=True, kw_only=True)
class Block:
    """What cannot be cut further, measured for one micro-batch.

    Attributes:
        name: Its name.
        forward, backward: Seconds, on a device of slowness 1.
        parameters: Bytes of its parameters and buffers.
        trained: Bytes of those parameters that are trained.
        saved: Bytes that its forward keeps for its backward, and that no block before keeps.
        saves: The numbers of their storages.
        boundary: Bytes that pass to the next block, and to those after it.
        passing: The same by the numbers of their storages.
        transient: Bytes beyond these at its worst moment.
        may_end: Whether a stage may end with it.
        named: Whether it begins with a module that people would know by its name.
    """

    name: str
    forward: float = 0.0
    backward: float = 0.0
    parameters: int = 0
    trained: int = 0
    saved: int = 0
    saves: frozenset[int] = frozenset()
    boundary: int = 0
    passing: Mapping[int, int] = field(default_factory=dict)
    transient: int = 0
    may_end: bool = True
    named: bool = True


@dataclass(frozen=True, kw_only=True)
class StageDevice:
    """What a stage has to do with.

    Attributes:
        slowness: How many times longer than measured everything takes there.
        memory: Bytes that may be planned with; None: no limit.
    """

    slowness: float = 1.0
    memory: int | None = None


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Consecutive blocks.

    Attributes:
        first, end: The first block, and the one after the last.
        forward, backward: Predicted seconds for one micro-batch.
        memory: Predicted bytes at the peak.
        parameters: Bytes of parameters and buffers.
    """

    first: int
    end: int
    forward: float
    backward: float
    memory: int
    parameters: int


class DoesNotFit(Exception):
    """No cut fits into the devices' memory.

    Attributes:
        best: The cut whose stages overrun their memory least.
    """

    def __init__(self, best: Sequence[int]) -> None:
        super().__init__("no cut fits")
        self.best = list(best)


class _Costs:
    """Sums over blocks, so that a stage of any length is priced at once."""

    def __init__(
        self,
        blocks: Sequence[Block],
        devices: Sequence[StageDevice],
        schedule: Schedule,
        micro_batches: int,
        state_factor: float,
    ) -> None:
        self.blocks, self.devices, self.state_factor = blocks, devices, state_factor
        self.micro_batches = micro_batches
        self.saver = {number: index for index, block in enumerate(blocks) for number in block.saves}
        self.flights = [in_flight(schedule, stage, len(devices), micro_batches) for stage in range(len(devices))]
        self.forward = [0.0, *accumulate(block.forward for block in blocks)]
        self.backward = [0.0, *accumulate(block.backward for block in blocks)]
        self.parameters = [0, *accumulate(block.parameters for block in blocks)]
        self.trained = [0, *accumulate(block.trained for block in blocks)]
        self.saved = [0, *accumulate(block.saved for block in blocks)]

    def stage(self, stage: int, first: int, end: int, transient: int | None = None) -> Stage:
        """What blocks from first to end come to as a stage."""
        if transient is None:
            transient = max(block.transient for block in self.blocks[first:end])
        slowness = self.devices[stage].slowness
        parameters = self.parameters[end] - self.parameters[first]
        trained = self.trained[end] - self.trained[first]
        flights, held = self.flights[stage], self._held(first, end)
        # Gradients are there from the first backward on, when one micro-batch is not held any more.
        activations = (
            flights * held + trained
            if flights < self.micro_batches
            else max(flights * held, (flights - 1) * held + trained)
        )
        return Stage(
            first=first,
            end=end,
            forward=(self.forward[end] - self.forward[first]) * slowness,
            backward=(self.backward[end] - self.backward[first]) * slowness,
            memory=int(parameters + (self.state_factor - 1) * trained + activations + transient),
            parameters=parameters,
        )

    def seconds(self, stage: int, first: int, end: int) -> float:
        """What they take, forward and backward."""
        whole = self.forward[end] - self.forward[first] + self.backward[end] - self.backward[first]
        return whole * self.devices[stage].slowness

    def _held(self, first: int, end: int) -> int:
        """Bytes of one micro-batch between its forward and its backward: what is saved, and what came and went."""
        held = self.saved[end] - self.saved[first]
        passing: dict[int, int] = {}
        for block in [*self.blocks[max(0, first - 1) : first], self.blocks[end - 1]]:
            passing |= block.passing
            if not block.passing:
                held += block.boundary
        return held + sum(size for number, size in passing.items() if not first <= self.saver.get(number, -1) < end)


def choose_cuts(
    blocks: Sequence[Block],
    devices: Sequence[StageDevice],
    *,
    schedule: Schedule = "1f1b",
    micro_batches: int = 1,
    state_factor: float = 3.0,
) -> list[int]:
    """Chooses the blocks with which stages end.

    Args:
        blocks: The blocks, in order.
        devices: One for each stage, in order.
        schedule: How micro-batches are computed; it decides how many activations a stage holds.
        micro_batches: Their number.
        state_factor: Bytes of gradients and the optimiser's state for each byte of a trained parameter. Default: 3,
            which is Adam's; 1 are the gradients.

    Returns:
        For each stage the index of the block after its last.

    Raises:
        ValueError: If there are more stages than places to cut.
        DoesNotFit: If no cut fits into memory.

    Example:
        >>> blocks = [Block(name=str(index), forward=seconds) for index, seconds in enumerate([1, 1, 1, 3])]
        >>> choose_cuts(blocks, [StageDevice(), StageDevice()])
        [3, 4]
    """
    costs = _Costs(blocks, devices, schedule, micro_batches, state_factor)
    cuts, (_, slowest, _) = _best(costs)
    cuts, (overrun, _, _) = _best(costs, _ALIKE * slowest)
    if cuts is None:
        raise ValueError(
            f"{len(devices)} stages need as many blocks, and places to cut between them; there are {len(blocks)}."
        )
    if overrun:
        raise DoesNotFit(cuts)
    return cuts


def describe_stages(
    blocks: Sequence[Block],
    devices: Sequence[StageDevice],
    cuts: Sequence[int],
    *,
    schedule: Schedule = "1f1b",
    micro_batches: int = 1,
    state_factor: float = 3.0,
) -> list[Stage]:
    """What the stages of a cut come to; see `choose_cuts`."""
    costs = _Costs(blocks, devices, schedule, micro_batches, state_factor)
    return [costs.stage(stage, first, end) for stage, (first, end) in enumerate(zip([0, *cuts], cuts, strict=False))]


Cost = tuple[float, float, int]  # bytes beyond the memory, as a share of it; seconds of the slowest; bytes that pass


def _best(costs: _Costs, enough: float = 0.0) -> tuple[list[int] | None, Cost]:
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
    costs: _Costs, stage: int, end: int, before: dict[int, tuple[Cost, int]], enough: float, hint: int | None
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
