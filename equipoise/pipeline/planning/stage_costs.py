"""Cost of a stage: time and memory of consecutive blocks on a device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from equipoise.pipeline.schedule.schedule import Schedule, actions_of, occupancy, releases_activations, splits

__all__ = ["Block", "Costs", "Stage", "StageDevice"]


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
        left: Bytes that the first part of a backward in two parts leaves for the second, beside what is saved.
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
    left: int = 0
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
        memory: Predicted bytes at the peak, of this stage alone.
        parameters: Bytes of parameters and buffers.
        resting: Bytes of these and of the optimiser's state.
        trained: Bytes of gradients, which are there from the first backward on.
        held: Bytes of one micro-batch between its forward and its backward.
        left: Bytes beyond these between the parts of a backward in two parts.
        transient: Bytes beyond these at its worst moment.
    """

    first: int
    end: int
    forward: float
    backward: float
    memory: int
    parameters: int
    resting: int = 0
    trained: int = 0
    held: int = 0
    left: int = 0
    transient: int = 0


class Costs:
    """Sums over blocks, so that a stage of any length is priced at once.

    Args:
        blocks: The blocks.
        devices: For each stage its device; see `StageDevice`.
        schedule: How micro-batches are computed.
        micro_batches: Their number.
        stages_per_device: How many stages each device has.
        state_factor: Bytes of gradients and the optimiser's state for each byte of a trained parameter.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        devices: Sequence[StageDevice],
        schedule: Schedule,
        micro_batches: int,
        stages_per_device: int,
        state_factor: float,
    ) -> None:
        self.blocks, self.devices, self.state_factor = blocks, devices, state_factor
        self._plan = (len(devices) // stages_per_device, micro_batches, stages_per_device)
        self._schedule = schedule
        self.saver = {number: index for index, block in enumerate(blocks) for number in block.saves}
        self.full = [occupancy(schedule, stage, *self._plan) for stage in range(len(devices))]
        self.forward = [0.0, *accumulate(block.forward for block in blocks)]
        self.backward = [0.0, *accumulate(block.backward for block in blocks)]
        self.parameters = [0, *accumulate(block.parameters for block in blocks)]
        self.trained = [0, *accumulate(block.trained for block in blocks)]
        self.saved = [0, *accumulate(block.saved for block in blocks)]
        self.left = [0, *accumulate(block.left for block in blocks)]

    def stage(self, stage: int, first: int, end: int, transient: int | None = None) -> Stage:
        """What blocks from first to end come to as a stage."""
        if transient is None:
            transient = max(block.transient for block in self.blocks[first:end])
        slowness = self.devices[stage].slowness
        parameters = self.parameters[end] - self.parameters[first]
        trained = self.trained[end] - self.trained[first]
        full, held = self.full[stage], self._held(first, end)
        # Nobody waits for gradients of the network's inputs, so all of the first stage's backward is left for later.
        left = self.left[end] - self.left[first] if first else self.blocks[end - 1].boundary
        resting = int(parameters + (self.state_factor - 1) * trained)
        return Stage(
            first=first,
            end=end,
            forward=(self.forward[end] - self.forward[first]) * slowness,
            backward=(self.backward[end] - self.backward[first]) * slowness,
            memory=resting + max(full.most * held, full.later * held + trained) + full.between * left + transient,
            parameters=parameters,
            resting=resting,
            trained=trained,
            held=held,
            left=left,
            transient=transient,
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

    def stages(self, cuts: Sequence[int]) -> list[Stage]:
        """What the stages of a cut come to."""
        return [self.stage(stage, first, end) for stage, (first, end) in enumerate(zip([0, *cuts], cuts, strict=False))]

    def peaks(self, stages: Sequence[Stage]) -> list[int]:
        """For each device the bytes at the peak, all of its stages together."""
        return [self._peak(device, stages) for device in range(self._plan[0])]

    def _peak(self, device: int, stages: Sequence[Stage]) -> int:
        """Goes through a device's actions; stages are full at different times."""
        now = peak = 0
        learns: set[int] = set()
        for stage, action in actions_of(self._schedule, device, *self._plan):
            each, before, gone = stages[stage], now, releases_activations(self._schedule, action)
            now += each.held * ((not action.backward) - gone)
            if splits(self._schedule):
                now += each.left * (action.backward - 2 * action.weights)
            if gone and stage not in learns:
                learns.add(stage)
                now += each.trained
            peak = max(peak, max(before, now) + each.transient)
        return peak + sum(stage.resting for stage in stages[device :: self._plan[0]])
