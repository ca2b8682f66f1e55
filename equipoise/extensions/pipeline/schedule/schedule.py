"""Schedules: the order in which devices compute forwards and backwards of micro-batches.

One stage on a device. "gpipe": all forwards, then all backwards (Huang et al., "GPipe", 2019). "1f1b": as many forwards
as are needed to fill the pipeline, then a backward after each forward, so that a stage holds the activations of at most
as many micro-batches as there are stages from it on (Narayanan et al., "PipeDream", 2019; Fan et al., "DAPPLE", 2021).

Several stages on a device: of p devices, device d has the stages d, d + p, d + 2p, ... The pipeline is then filled in
smaller steps: with v equal stages on each device and m micro-batches, the bubble is only (p - 1) / (v m + p - 1) of the
time. "looped_bfs": a stage's forwards of all micro-batches, then those of the device's next stage; backwards likewise
(Lamy-Poirier, "Breadth-first pipeline parallelism", 2023). "interleaved_1f1b": p micro-batches go through all stages of
a device before the next p do, and a backward follows each forward once the pipeline is full (Narayanan et al.,
"Efficient large-scale language model training on GPU clusters using Megatron-LM", 2021). The paper needs a multiple of
p micro-batches. Any number works here: the order is that of the next multiple, without the micro-batches that do not
exist. No action waits for these, so leaving them out cannot cause a deadlock.

"interleaved_zero_bubble": as interleaved 1F1B, but a backward is two actions: the gradients of a stage's inputs, for
which other stages wait, and those of its weights. No stage waits for the second, so they fill the gaps in which nothing
else can run (Qi et al., "Zero Bubble Pipeline Parallelism", 2023). If a forward and both halves of a backward take
equally long, and micro-batches are a multiple of p, the bubble is (p - 1) / (3 v m + p - 1) of the time. A simulation
of the step, with all actions equally long, decides which action fills which gap. A device holds the activations of at
most v p forwards that still wait for gradients of weights, as the paper's ZB-H1 does. Also for one stage on a device.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from equipoise.errors import ConfigurationError
from equipoise.extensions.common.timeline import Action
from equipoise.validation import check_whole

__all__ = [
    "SCHEDULES",
    "Schedule",
    "Task",
    "actions_of",
    "check_schedule",
    "check_stages",
    "effect_of",
    "needed_for",
    "occupancy",
    "receives",
    "splits",
]

Schedule = Literal["gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble"]
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble")

# For each schedule with one stage on a device, its counterpart with several.
_SEVERAL_STAGES: dict[Schedule, Schedule] = {
    "gpipe": "looped_bfs",
    "1f1b": "interleaved_1f1b",
}


Task = tuple[int, Action]  # index of a stage, and its action


# Arguments of the strategy.


def check_schedule(schedule: str) -> Schedule:
    """Return the schedule of this name.

    Raises:
        ConfigurationError: If no schedule has this name.
    """
    for name in SCHEDULES:
        if schedule == name:
            return name
    plain = _plain(str(schedule))
    hints = [f" Did you mean {name!r}?" for name in SCHEDULES if _plain(name) == plain]
    raise ConfigurationError(
        f"schedule must be one of {', '.join(map(repr, SCHEDULES))}, not {schedule!r}.{''.join(hints)}"
    )


def _plain(name: str) -> str:
    """Return a name without case and punctuation: torch writes "Interleaved1F1B"."""
    return "".join(filter(str.isalnum, name.lower()))


def check_stages(schedule: Schedule, stages_per_device: int | None) -> int:
    """Return the number of stages on each device.

    Args:
        schedule: The schedule.
        stages_per_device: The user's number; None: 1 where a schedule has one stage on a device, otherwise 2.

    Raises:
        ConfigurationError: If the schedule does not allow this number.
    """
    has_one_stage = schedule in _SEVERAL_STAGES
    if stages_per_device is None:
        return 1 if has_one_stage else 2
    check_whole("stages_per_device", stages_per_device, least=1)
    if has_one_stage and stages_per_device > 1:
        raise ConfigurationError(
            f"schedule={schedule!r} has one stage on each device, but stages_per_device={stages_per_device}. Take"
            f" schedule={_SEVERAL_STAGES[schedule]!r} for several, or leave stages_per_device out."
        )
    if not has_one_stage and stages_per_device == 1 and not splits(schedule):
        raise ConfigurationError(
            f"schedule={schedule!r} needs at least 2 stages on each device, but stages_per_device=1. Leave it out, or"
            " take schedule='1f1b' or 'gpipe' for one."
        )
    return stages_per_device


# The order of actions.


def actions_of(
    schedule: Schedule, device: int, devices: int, micro_batches: int, stages_per_device: int = 1
) -> list[Task]:
    """Return the actions of a device in one step, in their order: for each the stage and the action.

    Args:
        schedule: The schedule.
        device: Index of the device. It computes the stages `device`, `device + devices`, and so on.
        devices: Number of devices.
        micro_batches: Number of micro-batches, from 1. With fewer than devices, the bubble only grows.
        stages_per_device: Number of stages on each device. Default: 1.

    Example:
        >>> "".join("B" if action.backward else "F" for _, action in actions_of("1f1b", 1, 3, 4))
        'FFBFBFBB'
        >>> " ".join(f"{stage}{'B' if action.backward else 'F'}{action.micro_batch}"
        ...          for stage, action in actions_of("interleaved_1f1b", 1, 2, 2, 2))
        '1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1'
    """
    if splits(schedule):
        return list(_zero_bubble_plans(devices, micro_batches, stages_per_device)[device])

    # 1. Number of micro-batches that go through all stages of the device before the next ones do.
    if schedule in ("gpipe", "looped_bfs"):
        at_once = micro_batches
    else:
        at_once = devices

    # 2. Number of forwards before the first backward.
    following_devices = devices - device - 1
    if schedule == "1f1b":
        warm_up = following_devices + 1
    elif schedule == "interleaved_1f1b":
        # Half of these 2 (p - d - 1) forwards would fill the pipeline, but leave it idle while values are sent.
        warm_up = 2 * following_devices + (stages_per_device - 1) * devices + 1
    else:
        warm_up = micro_batches * stages_per_device

    stages = range(device, device + devices * stages_per_device, devices)
    return _alternate(stages, at_once, micro_batches, warm_up)


def _alternate(stages: Sequence[int], at_once: int, micro_batches: int, warm_up: int) -> list[Task]:
    """Return the order of a device: `warm_up` forwards, then a forward after each backward while any is left.

    Args:
        stages: Stages of the device, in the order of the network.
        at_once: Number of micro-batches that go through all stages of the device before the next ones do.
        micro_batches: Number of micro-batches.
        warm_up: Number of forwards before the first backward.
    """
    forwards = _rounds(stages, at_once, micro_batches, backward=False)
    backwards = _rounds(stages[::-1], at_once, micro_batches, backward=True)

    # 1. Alternate over full rounds, so that the order is that of a multiple of `at_once` micro-batches.
    order = forwards[:warm_up]
    waiting = deque(forwards[warm_up:])
    for backward in backwards:
        order.append(backward)
        if waiting:
            order.append(waiting.popleft())

    # 2. Leave out the micro-batches that do not exist.
    return [(stage, action) for stage, action in order if action.micro_batch < micro_batches]


def _rounds(stages: Sequence[int], at_once: int, micro_batches: int, *, backward: bool) -> list[Task]:
    """Return the order of `at_once` micro-batches per stage, padded to a full round."""
    tasks = []
    for first in range(0, micro_batches, at_once):
        for stage in stages:
            tasks += [(stage, Action(backward, index)) for index in range(first, first + at_once)]
    return tasks


@lru_cache(maxsize=64)
def _zero_bubble_plans(devices: int, micro_batches: int, stages_per_device: int) -> tuple[tuple[Task, ...], ...]:
    """Return the actions of all devices with gaps filled by gradients of weights.

    All devices advance together, one action at a time. The order that results is therefore free of deadlocks.
    """
    # 1. Plan forwards and backwards without gradients of weights.
    stages = devices * stages_per_device
    fillers = []
    for device in range(devices):
        stages_of_device = range(device, stages, devices)
        warm_up = stages - device
        fillers.append(_GapFiller(_alternate(stages_of_device, devices, micro_batches, warm_up), stages))

    # 2. Let each device do one action at a time. An action counts as done from the next moment on.
    done: set[Task] = set()
    while any(filler.is_unfinished for filler in fillers):
        now = []
        for filler in fillers:
            task = filler.next(done)
            if task is not None:
                now.append(task)
        assert now, "every device waits"
        done.update(now)
    return tuple(tuple(filler.tasks) for filler in fillers)


class _GapFiller:
    """Fill the gaps of one device with gradients of weights.

    Attributes:
        tasks: Tasks so far, in their order.
    """

    def __init__(self, plan: list[Task], stages: int) -> None:
        self.tasks: list[Task] = []
        self._plan = deque(plan)
        self._stages = stages
        self._weight_gradients: deque[Task] = deque()
        # Number of forwards that still wait for gradients of weights.
        self._active_forwards = 0

    @property
    def is_unfinished(self) -> bool:
        """True while tasks are left."""
        return bool(self._plan or self._weight_gradients)

    def next(self, done: set[Task]) -> Task | None:
        """Return the next task of the device; None if it waits."""
        if self._plan and self._can_run(self._plan[0], done):
            task = self._plan.popleft()
            stage, action = task
            if action.backward:
                second_half = action._replace(weights=True)
                self._weight_gradients.append((stage, second_half))
            else:
                self._active_forwards += 1
        elif self._weight_gradients:
            task = self._weight_gradients.popleft()
            self._active_forwards -= 1
        else:
            return None
        self.tasks.append(task)
        return task

    def _can_run(self, task: Task, done: set[Task]) -> bool:
        stage, action = task
        # A full device first computes gradients of weights, which releases activations.
        is_full = self._active_forwards >= self._stages
        if not action.backward and is_full and self._weight_gradients:
            return False
        needed = needed_for(stage, action, self._stages)
        return needed is None or needed in done


def needed_for(stage: int, action: Action, stages: int) -> Task | None:
    """Return the task that must be done before an action; None if the action can begin immediately.

    Args:
        stage: Index of the stage.
        action: Its action.
        stages: Number of stages of all devices.
    """
    # A forward waits for the stage before. A backward waits for the stage after; at the last stage, for the forward.
    if action.weights:
        first_half = action._replace(weights=False)
        return stage, first_half
    if action.backward and stage == stages - 1:
        forward = Action(False, action.micro_batch)
        return stage, forward
    if action.backward:
        return stage + 1, action
    if stage == 0:
        return None
    return stage - 1, action


def receives(stage: int, action: Action, last_stage: int) -> bool:
    """Return True if an action needs a value of another stage. The backward of the last stage begins with the loss."""
    return not action.weights and not (action.backward and stage == last_stage)


# The activations that a stage holds.


def splits(schedule: Schedule) -> bool:
    """Return True if the gradients of weights are actions of their own."""
    return schedule == "interleaved_zero_bubble"


class Effect(NamedTuple):
    """Changes of what a stage holds by an action.

    Attributes:
        active: Change of the number of micro-batches whose activations it holds.
        halved: Change of the number of micro-batches between the two halves of a split backward.
    """

    active: int
    halved: int


def effect_of(schedule: Schedule, action: Action) -> Effect:
    """Return the effect of an action. Activations are held until the weights have their gradients."""
    if not action.backward:
        return Effect(active=1, halved=0)
    if not splits(schedule):
        return Effect(active=-1, halved=0)
    if action.weights:
        return Effect(active=-1, halved=-1)
    return Effect(active=0, halved=1)


class Occupancy(NamedTuple):
    """Numbers of micro-batches whose activations a stage holds.

    Attributes:
        most: The largest number in the step.
        later: The largest number once the first backward is done, when gradients exist.
        between: The largest number of micro-batches between the two halves of a split backward.
    """

    most: int
    later: int
    between: int = 0


def occupancy(
    schedule: Schedule, stage: int, devices: int, micro_batches: int, stages_per_device: int = 1
) -> Occupancy:
    """Return how many micro-batches a stage holds; see `actions_of` for the arguments."""
    # The numbers after each action of the stage.
    active = [0]
    active_with_gradients = [0]
    halved = [0]
    has_gradients = False
    for task_stage, action in actions_of(schedule, stage % devices, devices, micro_batches, stages_per_device):
        if task_stage != stage:
            continue
        effect = effect_of(schedule, action)
        active.append(active[-1] + effect.active)
        halved.append(halved[-1] + effect.halved)
        has_gradients = has_gradients or effect.active < 0
        if has_gradients:
            active_with_gradients.append(active[-1])
    return Occupancy(max(active), max(active_with_gradients), max(halved))
