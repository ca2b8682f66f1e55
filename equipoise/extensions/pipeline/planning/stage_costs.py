"""Cost of a stage: time and memory of consecutive blocks on a device."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TypeVar

from equipoise.extensions.pipeline.schedule.schedule import Schedule, actions_of, effect_of, occupancy

__all__ = ["Block", "Costs", "Stage", "StageDevice"]

# Bytes of the optimiser's state for each byte of a trained parameter, as for Adam.
_STATE_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class Block:
    """Calls that stay together in one stage, measured for one micro-batch.

    Attributes:
        name: Its name.
        forward, backward: Seconds, on a device of slowness 1.
        parameters: Bytes of its parameters and buffers.
        trained: Bytes of its parameters that require gradients.
        saved: Bytes that its forward keeps for its backward, without those that an earlier block keeps.
        saves: Numbers of their storages.
        left: Bytes that the first half of a split backward leaves for the second, beside what is saved.
        boundary: Bytes that pass to the next block, and to those after it.
        passing: The same by the numbers of their storages.
        transient: Bytes at the peak beyond these.
        may_end: True if a stage may end with it.
        named: True if it begins with a module, which users know by its name.
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

    @property
    def seconds(self) -> float:
        """Seconds forward and backward."""
        return self.forward + self.backward

    def quicker(self, other: "Block") -> "Block":
        """Return this block with the shorter times of this and another measurement."""
        forward = min(self.forward, other.forward)
        backward = min(self.backward, other.backward)
        return replace(self, forward=forward, backward=backward)


@dataclass(frozen=True, kw_only=True)
class StageDevice:
    """Speed and memory of the device of a stage.

    Attributes:
        slowness: Time of a computation there, as a multiple of the measured time.
        memory: Available bytes; None: no limit.
        link: Seconds for each byte that passes to the device of the next stage, or back. Both devices are busy with it.
    """

    slowness: float = 1.0
    memory: int | None = None
    link: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Predicted costs of consecutive blocks.

    Attributes:
        first, end: Index of the first block, and of the one after the last.
        forward, backward: Seconds for one micro-batch, with the exchange of what passes.
        memory: Bytes at the peak, of this stage alone.
        parameters: Bytes of parameters and buffers.
        resting: Bytes of these and of the optimiser's state.
        trained: Bytes of gradients, which exist from the first backward on.
        activations: Bytes of one micro-batch between its forward and its backward.
        left: Bytes beyond these between the halves of a split backward.
        transient: Bytes at the peak beyond these.
    """

    first: int
    end: int
    forward: float
    backward: float
    memory: int
    parameters: int
    resting: int = 0
    trained: int = 0
    activations: int = 0
    left: int = 0
    transient: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of one micro-batch, forward and backward."""
        return self.forward + self.backward


_Number = TypeVar("_Number", int, float)


class _Sums(list[_Number]):
    """Sums of the first 0, 1, 2, ... values."""

    def __init__(self, values: Sequence[_Number]) -> None:
        super().__init__([0, *accumulate(values)])

    def between(self, first: int, end: int) -> _Number:
        """Return the sum of the values from `first` to the one before `end`."""
        return self[end] - self[first]


class Costs:
    """Cumulative costs of blocks, from which the costs of any stage are two look-ups.

    Args:
        blocks: The blocks.
        devices: One for each stage, in order. With several stages on each of p devices, stage s has the device of stage
            s - p.
        schedule: The schedule; it decides how many activations a stage holds. Default: "1f1b".
        micro_batches: Number of micro-batches. Default: 1.
        stages_per_device: Number of stages on each device. Default: 1.

    Attributes:
        blocks, devices: As above.
        num_devices: Number of devices.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        devices: Sequence[StageDevice],
        schedule: Schedule = "1f1b",
        micro_batches: int = 1,
        stages_per_device: int = 1,
    ) -> None:
        self.blocks = blocks
        self.devices = devices
        self.num_devices = len(devices) // stages_per_device
        self._schedule: Schedule = schedule
        # Arguments of `actions_of` and `occupancy`.
        self._plan = (self.num_devices, micro_batches, stages_per_device)
        self._occupancies = []
        for stage in range(len(devices)):
            self._occupancies.append(occupancy(schedule, stage, *self._plan))

        # By the number of a storage, the index of the block that saves it.
        self._saver: dict[int, int] = {}
        for index, block in enumerate(blocks):
            for number in block.saves:
                self._saver[number] = index

        # Sums over the first n blocks. A stage costs the difference of two of them.
        self._forward = _Sums([block.forward for block in blocks])
        self._backward = _Sums([block.backward for block in blocks])
        self._parameters = _Sums([block.parameters for block in blocks])
        self._trained = _Sums([block.trained for block in blocks])
        self._saved = _Sums([block.saved for block in blocks])
        self._left = _Sums([block.left for block in blocks])

    def with_memory(self, memory: Sequence[int | None]) -> "Costs":
        """Return the same costs with other limits of memory.

        Args:
            memory: For each stage the available bytes; None: no limit.
        """
        devices = []
        for device, limit in zip(self.devices, memory, strict=True):
            devices.append(replace(device, memory=limit))
        costs = copy.copy(self)
        costs.devices = devices
        return costs

    def stage(self, stage: int, first: int, end: int) -> Stage:
        """Return the costs of a stage.

        Args:
            stage: Index of the stage.
            first: Index of its first block.
            end: Index of the block after its last.
        """
        transient = max(block.transient for block in self.blocks[first:end])

        # 1. Memory that is occupied from the beginning, and memory of one micro-batch.
        parameters = self._parameters.between(first, end)
        trained = self._trained.between(first, end)
        resting = parameters + _STATE_BYTES * trained
        activations = self._activations(first, end)
        if first:
            left = self._left.between(first, end)
        else:
            # No stage waits for gradients of the network's inputs, so the first stage leaves its whole backward.
            left = self.blocks[end - 1].boundary

        # 2. The largest memory, of which halves of split backwards leave a part.
        peak = self._peak_of_stage(stage, trained, activations)
        halved = self._occupancies[stage].between * left

        slowness = self.devices[stage].slowness
        forward = self._forward.between(first, end) * slowness
        backward = self._backward.between(first, end) * slowness
        exchange = self._seconds_of_exchange(stage, first, end)
        return Stage(
            first=first,
            end=end,
            forward=forward + exchange,
            backward=backward + exchange,
            memory=resting + peak + halved + transient,
            parameters=parameters,
            resting=resting,
            trained=trained,
            activations=activations,
            left=left,
            transient=transient,
        )

    def least_memory(self, stage: int, first: int, end: int) -> int:
        """Return a lower bound of the bytes that a stage needs; it does not fall with more blocks."""
        parameters = self._parameters.between(first, end)
        trained = self._trained.between(first, end)
        saved = self._saved.between(first, end)
        resting = parameters + _STATE_BYTES * trained
        return resting + self._peak_of_stage(stage, trained, saved)

    def _peak_of_stage(self, stage: int, trained: int, activations: int) -> int:
        """Return the bytes of activations and gradients at the peak of a stage."""
        # It is either before the first backward, or later, when gradients exist.
        numbers = self._occupancies[stage]
        peak_before_gradients = numbers.most * activations
        peak_with_gradients = numbers.later * activations + trained
        return max(peak_before_gradients, peak_with_gradients)

    def _seconds_of_exchange(self, stage: int, first: int, end: int) -> float:
        """Return the seconds in which a stage receives its inputs and sends its outputs. Gradients take as long."""
        seconds = 0.0
        if first > 0:
            seconds += self.devices[stage - 1].link * self.blocks[first - 1].boundary
        if end < len(self.blocks):
            seconds += self.devices[stage].link * self.blocks[end - 1].boundary
        return seconds

    def exchange(self, stage: int, first: int, end: int) -> float:
        """Return the seconds in which a stage exchanges values and gradients with its neighbours."""
        return 2 * self._seconds_of_exchange(stage, first, end)

    def seconds(self, stage: int, first: int, end: int) -> float:
        """Return the seconds of a stage's forward and backward, without the exchange of what passes."""
        forward = self._forward
        backward = self._backward
        # The order of this sum decides how it is rounded, and so which of two equal cuts is chosen.
        seconds = forward[end] - forward[first] + backward[end] - backward[first]
        return seconds * self.devices[stage].slowness

    def _activations(self, first: int, end: int) -> int:
        """Return the bytes held per micro-batch: saved tensors, and the stage's inputs and outputs."""
        nbytes = self._saved.between(first, end)

        # 1. Storages that come in from the block before, and that go out after the last block.
        passing: dict[int, int] = {}
        blocks_before = self.blocks[max(0, first - 1) : first]
        last_block = self.blocks[end - 1]
        for block in [*blocks_before, last_block]:
            if block.passing:
                passing |= block.passing
            else:
                nbytes += block.boundary

        # 2. Those that a block of this stage saves have been counted.
        for number, size in passing.items():
            is_saved_here = first <= self._saver.get(number, -1) < end
            if not is_saved_here:
                nbytes += size
        return nbytes

    def stages(self, cuts: Sequence[int]) -> list[Stage]:
        """Return the costs of all stages of a cut.

        Args:
            cuts: For each stage the index of the block after its last.
        """
        stages = []
        first = 0
        for index, end in enumerate(cuts):
            stages.append(self.stage(index, first, end))
            first = end
        return stages

    def peaks(self, stages: Sequence[Stage]) -> list[int]:
        """Return for each device the bytes at the peak, all of its stages together."""
        return [self._peak(device, stages) for device in range(self.num_devices)]

    def _peak(self, device: int, stages: Sequence[Stage]) -> int:
        """Follow the actions of a device and return its peak: its stages are full at different times."""
        live = 0
        peak = 0
        stages_with_gradients: set[int] = set()
        for index, action in actions_of(self._schedule, device, *self._plan):
            stage = stages[index]
            live_before = live
            effect = effect_of(self._schedule, action)
            live += effect.active * stage.activations
            live += effect.halved * stage.left
            # Gradients of parameters stay from the first backward on.
            if effect.active < 0 and index not in stages_with_gradients:
                stages_with_gradients.add(index)
                live += stage.trained
            most = max(live_before, live)
            peak = max(peak, most + stage.transient)

        # Parameters and the optimiser's state are there all the time.
        return peak + sum(stage.resting for stage in stages[device :: self.num_devices])
