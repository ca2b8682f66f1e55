"""A recorded step cut into the stages of a pipeline, and the peak of a device that computes some of them.

The forward is cut by position: a stage begins where its first module allocates something. The backward goes through the
stages in reverse order, and the module of what it allocates tells the stage. Each micro-batch repeats both.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from equipoise.errors import ConfigurationError
from equipoise.extensions.common.device_loads import WHOLE_STEP, Part, StageAction
from equipoise.extensions.planning.curve.parts import Holder, PhaseStart, PredictedPeak, StepTrace
from equipoise.extensions.planning.curve.replay import Replay, numbers_of
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
    """The stages of a step, whose storages may have any sizes.

    Args:
        trace: The step.
        nbytes: Bytes of its storages, for stages of equal bytes.
        count: Number of stages.
        cut_before: Names of the modules with which the stages but the first begin; None: stages of equal bytes.

    Raises:
        ConfigurationError: If a name is unknown, or there are too few modules.
    """

    def __init__(
        self,
        trace: StepTrace,
        nbytes: Sequence[int],
        count: int,
        cut_before: Sequence[str] | None,
    ) -> None:
        first_phases = [start.phase for start in trace.phases[:2]]
        if first_phases != ["forward", "backward"]:
            raise ConfigurationError("a pipeline is predicted for steps with one forward and one backward")
        self._holders = trace.holders
        self._count = count
        forward = trace.events_of(0)
        backward = trace.events_of(1)
        names = _names_of_stages(
            trace,
            forward,
            nbytes,
            count,
            cut_before,
        )
        self._stages = _stages_of_holders(trace, forward, names)

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
        for event in backward:
            index = abs(event) - 1
            stage = self._stages[index]
            # Gradients of the last step go with the first backward.
            if index not in before:
                self._backwards[stage].append(event)

        # 2. What a stage hands over to the next one.
        self._outputs: dict[int, list[int]] = {}
        for stage, events in self._forwards.items():
            self._outputs[stage] = _outputs_of(trace.holders, events)

        # 3. What the optimiser needs for a moment, as bytes of the whole step.
        self._last_events: Sequence[int] = ()
        last = len(trace.phases) - 1
        if trace.phases[last].phase == _OPTIMIZER_STEP:
            self._last_events = trace.events_of(last)

    def peak(
        self,
        nbytes: Sequence[int],
        whole_batch: Sequence[int],
        actions: Sequence[StageAction],
        *,
        copies_inputs: bool,
    ) -> PredictedPeak:
        """Return the peak of a device.

        Args:
            nbytes: Bytes of the storages with one micro-batch.
            whole_batch: Those with the whole batch.
            actions: The actions of the device, in order.
            copies_inputs: Whether each stage but the first has copies of its inputs.
        """
        device = _Device(self._holders, nbytes)
        stages = sorted({action.stage for action in actions})

        # 1. What exists before the step: weights, states, gradients of the last step, and the batch.
        for stage in stages:
            for index in self._before[stage]:
                device.change(self._holders[index].category, whole_batch[index])

        # 2. The actions. After the first backward of a stage a gradient is on its way to the stage before.
        with_gradients: set[int] = set()
        for action in actions:
            output = self._passed(action.stage, nbytes)
            if not action.is_backward:
                device.begin("forward")
                if copies_inputs:
                    device.receive(self._passing(action.stage - 1, nbytes), action)
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
                device.change("copy", self._passing(action.stage - 1, nbytes))

        # 3. The optimiser's step.
        device.begin(_OPTIMIZER_STEP)
        device.change("temporary", self._needed_for_optimizer(nbytes, stages))
        replay = Replay(
            numbers_of(device.parts),
            np.array(device.changes, dtype=np.int64),
            device.starts,
            WHOLE_STEP,
        )
        return replay.peak()

    def _passing(self, stage: int, nbytes: Sequence[int]) -> int:
        """Return the bytes that a stage hands over to the next one; 0 for the last stage, and before the first."""
        index = self._passed(stage, nbytes)
        if index is None:
            return 0
        return nbytes[index]

    def _passed(self, stage: int, nbytes: Sequence[int]) -> int | None:
        """Return the storage that a stage hands over to the next one; None for the last stage, and before the first."""
        outputs = self._outputs.get(stage, ())
        if stage + 1 >= self._count or not outputs:
            return None
        largest = max(nbytes[index] for index in outputs)
        # Values are no larger than the indices beside them, and much larger than the statistics of a norm.
        large = [index for index in outputs if nbytes[index] * _VALUES >= largest]
        return min(large, key=lambda index: nbytes[index])

    def _needed_for_optimizer(self, nbytes: Sequence[int], stages: Sequence[int]) -> int:
        """Return the most bytes that the optimiser's step of some stages needs for a moment."""
        most, count = _most(self._last_events, nbytes)
        total = 0
        part = 0
        largest = 0
        trained = 0
        for index, holder in enumerate(self._holders):
            trained += holder.category == "gradient"
            if holder.category != "parameter":
                continue
            size = nbytes[index]
            total += size
            stage = self._stages[index]
            if stage in stages:
                part += size
                largest = max(largest, size)
        # Either all parameters are stepped together, or one after the other; no stage needs more for one than for its
        # largest.
        if count >= trained:
            share = part / max(1, total)
            return round(share * most)
        smaller = []
        for event in self._last_events:
            index = abs(event) - 1
            if nbytes[index] <= largest:
                smaller.append(event)
        most, _ = _most(smaller, nbytes)
        return most


class _Device:
    """Changes in the memory of a device, one action after the other.

    Args:
        holders: The storages of the step.
        nbytes: Their bytes with one micro-batch.

    Attributes:
        parts: The part of each change.
        changes: Its bytes, negative for a release.
        starts: The beginnings of the phases.
    """

    def __init__(self, holders: Sequence[Holder], nbytes: Sequence[int]) -> None:
        self.parts: list[Part] = []
        self.changes: list[int] = []
        self.starts: list[PhaseStart] = []
        self._holders = holders
        self._nbytes = nbytes
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
            category = self._holders[index].category
            nbytes = self._nbytes[index]
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
            self.change(self._holders[index].category, -self._nbytes[index])
        self.change("copy", -self._received.pop(key, 0))


# The cut.


def _names_of_stages(
    trace: StepTrace,
    forward: Sequence[int],
    nbytes: Sequence[int],
    count: int,
    cut_before: Sequence[str] | None,
) -> list[str]:
    """Return the first modules of the stages but the first.

    Raises:
        ConfigurationError: If a name is unknown, or there are too few modules.
    """
    order = _modules_in_order(trace, forward)
    if cut_before is None:
        return _equal_parts(trace, order, nbytes, count)
    names = []
    for name in cut_before:
        matches = [module for module in order if _is_within(module, name)]
        if not matches:
            raise ConfigurationError(f"cut_before names {name!r}, which the training step does not call")
        names.append(matches[0])
    return names


def _modules_in_order(trace: StepTrace, forward: Sequence[int]) -> list[str]:
    """Return the modules that allocate something in the forward, in the order of the first time."""
    order = {}
    for event in forward:
        holder = trace.holders[abs(event) - 1]
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


def _equal_parts(
    trace: StepTrace,
    order: Sequence[str],
    nbytes: Sequence[int],
    count: int,
) -> list[str]:
    """Return the modules before which parts of equal bytes begin: parameters and what the step allocates."""
    # 1. The bytes of each module.
    by_module: dict[str, int] = defaultdict(int)
    for index, holder in enumerate(trace.holders):
        if holder.category in ("parameter", "activation"):
            by_module[holder.module] += nbytes[index]
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


def _stages_of_holders(trace: StepTrace, forward: Sequence[int], names: Sequence[str]) -> list[int]:
    """Return the stage of each storage.

    Args:
        trace: The step.
        forward: The events of its forward.
        names: The first modules of the stages but the first.
    """
    # 1. Activations of the forward, by position. A module of several stages, such as the root, tells nothing.
    last = len(names)
    stages: dict[int, int] = {}
    of_modules: dict[str, set[int]] = defaultdict(set)
    current = 0
    for event in forward:
        index = abs(event) - 1
        holder = trace.holders[index]
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
    for index, holder in enumerate(trace.holders):
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


def _most(events: Sequence[int], nbytes: Sequence[int]) -> tuple[int, int]:
    """Return the most bytes that a phase adds to those at its beginning, and in how many storages these are."""
    running = 0
    count = 0
    most = (0, 0)
    for event in events:
        # A negative event is a release.
        sign = 1 if event > 0 else -1
        running += sign * nbytes[abs(event) - 1]
        count += sign
        most = max(most, (running, count))
    return most
