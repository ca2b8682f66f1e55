"""Schedules: the order in which devices compute forwards and backwards of micro-batches.

One stage on a device. "gpipe": all forwards, then all backwards (Huang et al., "GPipe", 2019). "1f1b": as many forwards
as are needed to fill the pipeline, then a backward after each forward, so that a stage holds the activations of at most
as many micro-batches as there are stages from it on (Narayanan et al., "PipeDream", 2019; Fan et al., "DAPPLE", 2021).

Several stages on a device: of p devices, device d has the stages d, d + p, d + 2p, ... So the pipeline is filled in
smaller steps: with v equal stages on each device and m micro-batches only (p - 1) / (v m + p - 1) of the time is lost.
"looped_bfs": a stage's forwards of all micro-batches, then those of the device's next stage; backwards likewise
(Lamy-Poirier, "Breadth-first pipeline parallelism", 2023). "interleaved_1f1b": p micro-batches go through all stages of
a device before the next p do, and a backward follows each forward once the pipeline is full (Narayanan et al.,
"Efficient large-scale language model training on GPU clusters using Megatron-LM", 2021). The paper needs a multiple of
p micro-batches. Here any number goes: the order is that of the next multiple, without the micro-batches that there are
not. Nothing waits for these, so nothing comes to wait for ever.

"interleaved_zero_bubble": as interleaved 1F1B, but a backward is two actions: the gradients of a stage's inputs, for
which others wait, and those of its weights, for which nobody does, so that they fill the time in which there is nothing
else to do (Qi et al., "Zero Bubble Pipeline Parallelism", 2023). Where a forward and both halves of a backward take
equally long, and micro-batches are a multiple of p, (p - 1) / (3 v m + p - 1) of the time is lost. Which gap is filled
with what follows from going through the step once with all actions equally long. A device holds the activations of at
most v p forwards whose weights have not had their gradients, as the paper's ZB-H1 does. Also for one stage on a device.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from equipoise.errors import ConfigurationError

__all__ = [
    "SCHEDULES",
    "Action",
    "Schedule",
    "actions_of",
    "check_schedule",
    "check_stages",
    "lets_go",
    "needed_for",
    "occupancy",
    "splits",
]

Schedule = Literal["gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble"]
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble")
_LOOPS: dict[Schedule, Schedule] = {"gpipe": "looped_bfs", "1f1b": "interleaved_1f1b"}  # by what has one stage

# Schedules of torch's, and why they are none of ours.
_OTHERS = {
    "zbv": "computes no evaluation in torch, and waits for ever after the error.",
    "dualpipe": "computes no evaluation in torch, and waits for ever after the error.",
}


class Action(NamedTuple):
    """What a stage does next.

    Attributes:
        backward: Whether it is a backward.
        micro_batch: Of which micro-batch.
        weights: Whether it is what a backward in two parts left for later, the gradients of weights. Default: False.
    """

    backward: bool
    micro_batch: int
    weights: bool = False


Task = tuple[int, Action]  # a stage, and what it does


def check_schedule(schedule: str) -> Schedule:
    """The schedule of a name.

    Raises:
        ConfigurationError: If there is none.
    """
    for known in SCHEDULES:
        if schedule == known:
            return known
    plain = _plain(str(schedule))
    meant = next((known for known in SCHEDULES if _plain(known) == plain), None)
    why = next((f" {schedule!r} {reason}" for name, reason in _OTHERS.items() if name in plain), "")
    hint = why if meant is None else f" Did you mean {meant!r}?"
    raise ConfigurationError(f"schedule must be one of {', '.join(map(repr, SCHEDULES))}, not {schedule!r}.{hint}")


def _plain(name: str) -> str:
    """A name as torch and others may write it, such as "Interleaved1F1B"."""
    return "".join(filter(str.isalnum, name.lower()))


def check_stages(schedule: Schedule, stages_per_device: int | None) -> int:
    """How many stages each device has.

    Args:
        schedule: The schedule.
        stages_per_device: What the user asks for; None: 1 where a schedule has one stage on a device, otherwise 2.

    Returns:
        Their number.

    Raises:
        ConfigurationError: If the schedule cannot have so many.
    """
    one = schedule in _LOOPS
    if stages_per_device is None:
        return 1 if one else 2
    if type(stages_per_device) is not int or stages_per_device < 1:
        raise ConfigurationError(f"stages_per_device is a whole number from 1, not {stages_per_device!r}.")
    if one and stages_per_device > 1:
        raise ConfigurationError(
            f"schedule={schedule!r} has one stage on each device, but stages_per_device={stages_per_device}. Take"
            f" schedule={_LOOPS[schedule]!r} for several, or leave stages_per_device out."
        )
    if not one and stages_per_device == 1 and not splits(schedule):
        raise ConfigurationError(
            f"schedule={schedule!r} needs at least 2 stages on each device, but stages_per_device=1. Leave it out, or"
            " take schedule='1f1b' or 'gpipe' for one."
        )
    return stages_per_device


def actions_of(
    schedule: Schedule, device: int, devices: int, micro_batches: int, stages_per_device: int = 1
) -> list[Task]:
    """What a device does in a step: for each action the stage, and what it does.

    Args:
        schedule: The schedule.
        device: The device, from 0. It has the stages `device`, `device + devices`, and so on.
        devices: The number of devices.
        micro_batches: The number of micro-batches; any from 1, with fewer than devices there is only more idling.
        stages_per_device: How many stages each device has. Default: 1.

    Example:
        >>> "".join("B" if action.backward else "F" for _, action in actions_of("1f1b", 1, 3, 4))
        'FFBFBFBB'
        >>> " ".join(f"{stage}{'B' if action.backward else 'F'}{action.micro_batch}"
        ...          for stage, action in actions_of("interleaved_1f1b", 1, 2, 2, 2))
        '1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1'
    """
    if splits(schedule):
        return list(_with_gaps_filled(devices, micro_batches, stages_per_device)[device])
    at_once = micro_batches if schedule in ("gpipe", "looped_bfs") else devices
    # Interleaved 1F1B would be full with half of the 2 (p - d - 1), but idle while values are on their way.
    warm_up = {
        "1f1b": devices - device,
        "interleaved_1f1b": 2 * (devices - device - 1) + (stages_per_device - 1) * devices + 1,
    }.get(schedule, micro_batches * stages_per_device)
    stages = range(device, device + devices * stages_per_device, devices)
    return _in_turn(stages, at_once, micro_batches, warm_up)


def _in_turn(stages: Sequence[int], at_once: int, micro_batches: int, warm_up: int) -> list[Task]:
    """Forwards of so many micro-batches at once, stage after stage; after so many a backward before each forward."""
    forwards = _turns(stages, at_once, micro_batches, backward=False)
    backwards = _turns(stages[::-1], at_once, micro_batches, backward=True)
    actions, waiting = forwards[:warm_up], iter(forwards[warm_up:])
    for backward in backwards:
        actions += [backward, *(forward for forward in [next(waiting, None)] if forward is not None)]
    return [(stage, action) for stage, action in actions if action.micro_batch < micro_batches]


def _turns(stages: Sequence[int], at_once: int, micro_batches: int, *, backward: bool) -> list[Task]:
    """So many micro-batches through one stage after another, then the next ones; also those that there are not."""
    return [
        (stage, Action(backward, index))
        for first in range(0, micro_batches, at_once)
        for stage in stages
        for index in range(first, first + at_once)
    ]


@lru_cache(maxsize=64)
def _with_gaps_filled(devices: int, micro_batches: int, stages_per_device: int) -> tuple[tuple[Task, ...], ...]:
    """The lists of all devices: forwards and backwards in turn, gradients of weights where nothing else can be done.

    All devices are gone through together, moment by moment, so an order that lets all go on is what is written down.
    """
    stages = devices * stages_per_device
    plans = [
        _in_turn(range(device, stages, devices), devices, micro_batches, stages - device) for device in range(devices)
    ]
    gaps = [_Gaps(plan, stages) for plan in plans]
    done: set[Task] = set()
    while any(each.unfinished for each in gaps):
        now = [task for each in gaps if (task := each.next(done)) is not None]
        assert now, "every device waits"
        done.update(now)
    return tuple(tuple(each.made) for each in gaps)


class _Gaps:
    """A device whose gaps are filled.

    Args:
        plan: Its forwards and backwards.
        stages: The number of stages, of all devices.
    """

    def __init__(self, plan: list[Task], stages: int) -> None:
        self._plan, self._stages = deque(plan), stages
        self._left: deque[Task] = deque()  # gradients of weights
        self._held = 0  # forwards whose weights have not had their gradients
        self.made: list[Task] = []

    @property
    def unfinished(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self._plan or self._left)

    def next(self, done: set[Task]) -> Task | None:
        """What it does next, when so much is done; None if it waits."""
        if self._plan and self._may(*self._plan[0], done):
            stage, action = task = self._plan.popleft()
            if action.backward:
                self._left.append((stage, action._replace(weights=True)))
            else:
                self._held += 1
        elif self._left:
            task = self._left.popleft()
            self._held -= 1
        else:
            return None
        self.made.append(task)
        return task

    def _may(self, stage: int, action: Action, done: set[Task]) -> bool:
        needed = needed_for(stage, action, self._stages)
        full = not action.backward and self._held >= self._stages and bool(self._left)
        return not full and (needed is None or needed in done)


def needed_for(stage: int, action: Action, stages: int) -> Task | None:
    """What must have been done before an action, and in which stage; None if it can begin at once."""
    if action.weights:
        return stage, action._replace(weights=False)
    if action.backward:
        return (stage, Action(False, action.micro_batch)) if stage == stages - 1 else (stage + 1, action)
    return (stage - 1, action) if stage else None


class Occupancy(NamedTuple):
    """Of how many micro-batches a stage holds the activations.

    Attributes:
        most: At most.
        later: At most once the first backward is done, and gradients are there.
        between: At most between the two parts of its backward, if it has two.
    """

    most: int
    later: int
    between: int = 0


def occupancy(
    schedule: Schedule, stage: int, devices: int, micro_batches: int, stages_per_device: int = 1
) -> Occupancy:
    """How full a stage becomes; see `actions_of`."""
    held = most = later = half = between = 0
    learns = False
    for at, action in actions_of(schedule, stage % devices, devices, micro_batches, stages_per_device):
        if at == stage:
            gone = lets_go(schedule, action)
            held, learns = held + (not action.backward) - gone, learns or gone
            most, later = max(most, held), max(later, held * learns)
            half += action.backward - gone - action.weights
            between = max(between, half)
    return Occupancy(most, later, between)


def splits(schedule: Schedule) -> bool:
    """Whether the gradients of weights are computed by actions of their own."""
    return schedule == "interleaved_zero_bubble"


def lets_go(schedule: Schedule, action: Action) -> bool:
    """Whether a stage is done with a micro-batch after an action: its weights have their gradients."""
    return action.weights if splits(schedule) else action.backward
