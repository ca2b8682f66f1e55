"""A recorded step cut into the stages of a pipeline, and the peak of a device that computes some of them.

The forward is cut by position: a stage begins where its first module allocates something. The backward goes through the
stages in reverse order, and the module of what it allocates tells the stage. Each micro-batch repeats both.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from equipoise.errors import ConfigurationError
from equipoise.extensions.common.device_loads import WHOLE_STEP, Part, StageAction
from equipoise.extensions.planning.peaks.recorded_step import Holder, PhaseStart, RecordedStep
from equipoise.extensions.planning.peaks.replay import PredictedPeak, Replay, numbers_of
from equipoise.memory.records import Category

__all__ = ["StagesOfStep"]

# What a stage has all the time.
_RESTING: tuple[Category, ...] = ("parameter", "buffer", "optimizer state")
_OF_PARAMETERS: tuple[Category, ...] = (*_RESTING, "gradient")
# Everything that exists before a forward computes.
_NOT_COMPUTED: tuple[Category, ...] = (*_OF_PARAMETERS, "batch")
_OPTIMIZER_STEP = "optimizer step"
# A storage that is smaller than its neighbour by more than this factor has no values of samples.
_VALUES = 8


class StagesOfStep:
    """The stages of a step with one micro-batch.

    Args:
        step: The step.
        rounding: Bytes to which an allocator rounds each storage up.
        count: Number of stages.
        cut_before: Names of the modules with which the stages but the first begin; None: stages of equal bytes.

    Raises:
        ConfigurationError: If a name is unknown, or there are too few modules.
    """

    def __init__(
        self,
        step: RecordedStep,
        rounding: int,
        count: int,
        cut_before: Sequence[str] | None,
    ) -> None:
        first_phases = [start.phase for start in step.phases[:2]]
        if first_phases != ["forward", "backward"]:
            raise ConfigurationError("a pipeline is predicted for steps with one forward and one backward")
        self._rounding = rounding
        self._count = count
        self._holders = [holder._replace(nbytes=self._rounded(holder.nbytes)) for holder in step.holders]
        forward = step.events_of(0)
        names = _names_of_stages(self._holders, forward, count, cut_before)
        self._stages = _stages_of_holders(self._holders, forward, names)

        # 1. What each stage has before, and computes for each micro-batch.
        self._before: dict[int, list[int]] = defaultdict(list)
        self._forwards: dict[int, list[int]] = defaultdict(list)
        self._backwards: dict[int, list[int]] = defaultdict(list)
        before = set()
        for event in forward:
            index = abs(event) - 1
            stage = self._stages[index]
            category = self._holders[index].category
            if event > 0 and category in _NOT_COMPUTED:
                before.add(index)
                self._before[stage].append(index)
            elif index not in before:
                self._forwards[stage].append(event)
        for event in step.events_of(1):
            index = abs(event) - 1
            stage = self._stages[index]
            # Gradients of the last step go with the first backward.
            if index not in before:
                self._backwards[stage].append(event)

        # 2. What a stage hands over to the next one.
        self._outputs: dict[int, list[int]] = {}
        for stage, events in self._forwards.items():
            self._outputs[stage] = _outputs_of(self._holders, events)

        # 3. What the optimiser needs for a moment, as bytes of the whole step.
        self._last_events: Sequence[int] = ()
        last = len(step.phases) - 1
        if step.phases[last].phase == _OPTIMIZER_STEP:
            self._last_events = step.events_of(last)

    def _rounded(self, nbytes: int) -> int:
        """Return bytes as an allocator rounds them up."""
        return -(-nbytes // self._rounding) * self._rounding

    def peak(self, micro_batches: int, actions: Sequence[StageAction], *, copies_inputs: bool) -> PredictedPeak:
        """Return the peak of a device.

        Args:
            micro_batches: Their number in a batch.
            actions: The actions of the device, in order.
            copies_inputs: Whether each stage but the first has copies of its inputs.
        """
        device = _Device(self._holders)
        stages = sorted({action.stage for action in actions})

        # 1. What exists before the step: weights, states, gradients of the last step, and the batch.
        for stage in stages:
            for index in self._before[stage]:
                category, _, nbytes = self._holders[index]
                if category == "batch":
                    # All of it is there, and not one micro-batch.
                    nbytes *= micro_batches
                device.change(category, nbytes)

        # 2. The actions. After the first backward of a stage a gradient is on its way to the stage before.
        with_gradients: set[int] = set()
        for action in actions:
            output = self._passed(action.stage)
            if not action.is_backward:
                device.begin("forward")
                if copies_inputs:
                    device.receive(self._passing(action.stage - 1), action)
                device.compute(
                    self._forwards[action.stage],
                    action,
                    output=output,
                )
                continue
            device.begin("backward")
            if not with_gradients:
                device.forget_gradients()
            has_gradients = action.stage in with_gradients
            device.compute(
                self._backwards[action.stage],
                action,
                output=output,
                has_gradients=has_gradients,
            )
            device.end(action)
            if not has_gradients:
                with_gradients.add(action.stage)
                device.change("copy", self._passing(action.stage - 1))

        # 3. The optimiser's step.
        device.begin(_OPTIMIZER_STEP)
        device.change("temporary", self._needed_for_optimizer(stages))
        replay = Replay(
            numbers_of(device.parts),
            np.array(device.changes, dtype=np.int64),
            device.starts,
            WHOLE_STEP,
        )
        return replay.peak()

    def _passing(self, stage: int) -> int:
        """Return the bytes that a stage hands over to the next one; 0 for the last stage, and before the first."""
        index = self._passed(stage)
        if index is None:
            return 0
        return self._holders[index].nbytes

    def _passed(self, stage: int) -> int | None:
        """Return the storage that a stage hands over to the next one; None for the last stage, and before the first."""
        outputs = self._outputs.get(stage, ())
        if stage + 1 >= self._count or not outputs:
            return None
        largest = max(self._holders[index].nbytes for index in outputs)
        # Values are no larger than the indices beside them, and much larger than the statistics of a norm.
        large = [index for index in outputs if self._holders[index].nbytes * _VALUES >= largest]
        return min(large, key=lambda index: self._holders[index].nbytes)

    def _needed_for_optimizer(self, stages: Sequence[int]) -> int:
        """Return the most bytes that the optimiser's step of some stages needs for a moment."""
        most, count = _most(self._last_events, self._holders)
        total = 0
        part = 0
        largest = 0
        trained = 0
        for index, holder in enumerate(self._holders):
            trained += holder.category == "gradient"
            if holder.category != "parameter":
                continue
            total += holder.nbytes
            if self._stages[index] in stages:
                part += holder.nbytes
                largest = max(largest, holder.nbytes)
        # Either all parameters are stepped together, or one after the other; no stage needs more for one than for its
        # largest.
        if count >= trained:
            share = part / max(1, total)
            return round(share * most)
        smaller = []
        for event in self._last_events:
            if self._holders[abs(event) - 1].nbytes <= largest:
                smaller.append(event)
        most, _ = _most(smaller, self._holders)
        return most


class _Device:
    """Changes in the memory of a device, one action after the other.

    Args:
        holders: The storages of the step.

    Attributes:
        parts: The part of each change.
        changes: Its bytes, negative for a release.
        starts: The beginnings of the phases.
    """

    def __init__(self, holders: Sequence[Holder]) -> None:
        self.parts: list[Part] = []
        self.changes: list[int] = []
        self.starts: list[PhaseStart] = []
        self._holders = holders
        self._gradients = 0
        # Storages of each stage and micro-batch that are in flight.
        self._in_flight: dict[tuple[int, int], set[int]] = defaultdict(set)
        # Bytes of their inputs, where these are copied.
        self._received: dict[tuple[int, int], int] = {}

    def begin(self, phase: str) -> None:
        """Begin a phase."""
        self.starts.append(PhaseStart(phase, len(self.changes)))

    def change(self, part: Part, nbytes: int) -> None:
        """Add bytes, or release them if they are negative."""
        self.parts.append(part)
        self.changes.append(nbytes)
        if part == "gradient":
            self._gradients += nbytes

    def receive(self, nbytes: int, action: StageAction) -> None:
        """Add a copy of what a stage receives for a micro-batch."""
        self._received[action.stage, action.micro_batch] = nbytes
        self.change("copy", nbytes)

    def forget_gradients(self) -> None:
        """Release the gradients of the last step."""
        self.change("gradient", -self._gradients)

    def compute(
        self,
        events: Sequence[int],
        action: StageAction,
        *,
        output: int | None,
        has_gradients: bool = False,
    ) -> None:
        """Replay events of a stage for one micro-batch.

        Args:
            events: The events.
            action: The action.
            output: The storage that the stage hands over, which it keeps until the end of its backward.
            has_gradients: True if its gradients exist already, so that those of this micro-batch are added to them.
        """
        alive = self._in_flight[(action.stage, action.micro_batch)]
        for event in events:
            index = abs(event) - 1
            category, _, nbytes = self._holders[index]
            if event < 0:
                if index in alive and index != output:
                    alive.remove(index)
                    self.change(category, -nbytes)
                continue
            self.change(category, nbytes)
            if category != "gradient":
                alive.add(index)
            elif has_gradients:
                self.change(category, -nbytes)

    def end(self, action: StageAction) -> None:
        """Release what the backward of a micro-batch has left of its forward."""
        key = (action.stage, action.micro_batch)
        for index in self._in_flight.pop(key):
            category, _, nbytes = self._holders[index]
            self.change(category, -nbytes)
        self.change("copy", -self._received.pop(key, 0))


# The cut.


def _names_of_stages(
    holders: Sequence[Holder], forward: Sequence[int], count: int, cut_before: Sequence[str] | None
) -> list[str]:
    """Return the first modules of the stages but the first.

    Raises:
        ConfigurationError: If a name is unknown, or there are too few modules.
    """
    order = _modules_in_order(holders, forward)
    if cut_before is None:
        return _equal_parts(holders, order, count)
    names = []
    for name in cut_before:
        matches = [module for module in order if _is_within(module, name)]
        if not matches:
            raise ConfigurationError(f"cut_before names {name!r}, which the training step does not call")
        names.append(matches[0])
    return names


def _modules_in_order(holders: Sequence[Holder], forward: Sequence[int]) -> list[str]:
    """Return the modules that allocate something in the forward, in the order of the first time."""
    order = {}
    for event in forward:
        holder = holders[abs(event) - 1]
        is_computed = holder.category not in _NOT_COMPUTED
        # The root is no part of the network.
        if event > 0 and is_computed and holder.module:
            order[holder.module] = True
    return list(order)


def _is_within(module: str, name: str) -> bool:
    """Return True for a module of this name or within it; the name may begin in the network instead of its parent."""
    _, _, in_network = module.partition(".")
    # With a point, "layer1" is not within "layer".
    prefix = f"{name}."
    return any(place.startswith(prefix) for place in (f"{module}.", f"{in_network}."))


def _equal_parts(holders: Sequence[Holder], order: Sequence[str], count: int) -> list[str]:
    """Return the modules before which parts of equal bytes begin: parameters and what the step allocates."""
    # 1. The bytes of each module.
    by_module: dict[str, int] = defaultdict(int)
    for holder in holders:
        if holder.category in ("parameter", "activation"):
            by_module[holder.module] += holder.nbytes
    total = sum(by_module[module] for module in order)

    # 2. A part ends where its share is reached.
    names: list[str] = []
    running = 0
    for module in order:
        parts = len(names) + 1
        is_due = running >= total * parts / count
        if is_due and parts < count and running:
            names.append(module)
        running += by_module[module]
    parts = len(names) + 1
    if parts < count:
        raise ConfigurationError(f"the network has too few parts for {count} stages")
    return names


def _stages_of_holders(holders: Sequence[Holder], forward: Sequence[int], names: Sequence[str]) -> list[int]:
    """Return the stage of each storage.

    Args:
        holders: The storages.
        forward: The events of the forward.
        names: The first modules of the stages but the first.
    """
    # 1. Activations of the forward, by position. A module of several stages, such as the root, tells nothing.
    last = len(names)
    stages: dict[int, int] = {}
    of_modules: dict[str, set[int]] = defaultdict(set)
    current = 0
    for event in forward:
        index = abs(event) - 1
        holder = holders[index]
        if event < 0 or holder.category in _NOT_COMPUTED:
            continue
        if current < last and holder.module == names[current]:
            current += 1
        stages[index] = current
        of_modules[holder.module].add(current)
    known = {}
    for module, in_stages in of_modules.items():
        if module and len(in_stages) == 1:
            known[module] = in_stages.pop()

    # 2. All others, by their modules. The backward begins with the last stage.
    result = []
    current = last
    for index, holder in enumerate(holders):
        if index in stages:
            result.append(stages[index])
        elif holder.category in _OF_PARAMETERS:
            result.append(_stage_of_owner(holder.module, known))
        elif holder.category == "batch":
            result.append(last)
        else:
            current = known.get(holder.module, current)
            result.append(current)
    return result


def _stage_of_owner(module: str, known: Mapping[str, int]) -> int:
    """Return the stage of a module's parameters: its own, the first of its children's, or that of its parent."""
    name = module
    while True:
        if name in known:
            return known[name]
        prefix = ""
        if name:
            prefix = f"{name}."
        inner = []
        for other, stage in known.items():
            if other.startswith(prefix):
                inner.append(stage)
        if inner:
            return min(inner)
        # The parent may be known.
        name = name.rpartition(".")[0]


def _outputs_of(holders: Sequence[Holder], events: Sequence[int]) -> list[int]:
    """Return the storages that the last operations of a forward have allocated: those of its last module, in a row."""
    allocated = [event - 1 for event in events if event > 0]
    outputs: list[int] = []
    for index in reversed(allocated):
        if outputs and holders[index].module != holders[outputs[0]].module:
            break
        outputs.append(index)
    return outputs


def _most(events: Sequence[int], holders: Sequence[Holder]) -> tuple[int, int]:
    """Return the most bytes that a phase adds to those at its beginning, and in how many storages these are."""
    running = 0
    count = 0
    most = (0, 0)
    for event in events:
        # A negative event is a release.
        sign = 1 if event > 0 else -1
        running += sign * holders[abs(event) - 1].nbytes
        count += sign
        most = max(most, (running, count))
    return most
