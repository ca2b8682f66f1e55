"""In which order the devices of a pipeline compute the forwards and backwards of micro-batches.

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
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from equipoise.errors import ConfigurationError

__all__ = [
    "SCHEDULES",
    "Action",
    "Schedule",
    "actions_of",
    "check_schedule",
    "check_stages",
    "in_flight",
    "occupancy",
]

Schedule = Literal["gpipe", "1f1b", "looped_bfs", "interleaved_1f1b"]
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "looped_bfs", "interleaved_1f1b")
_LOOPS: dict[Schedule, Schedule] = {"gpipe": "looped_bfs", "1f1b": "interleaved_1f1b"}  # by what has one stage

# Schedules of torch's, and why they are none of ours.
_OTHERS = {
    "zbv": "computes no evaluation in torch, and waits for ever after the error.",
    "dualpipe": "computes no evaluation in torch, and waits for ever after the error.",
    "zerobubble": "needs backwards in two parts, of inputs and of weights; here each is one.",
}


class Action(NamedTuple):
    """What a stage does next.

    Attributes:
        backward: Whether it is a backward.
        micro_batch: Of which micro-batch.
    """

    backward: bool
    micro_batch: int


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
    if not one and stages_per_device == 1:
        raise ConfigurationError(
            f"schedule={schedule!r} needs at least 2 stages on each device, but stages_per_device=1. Leave it out, or"
            " take schedule='1f1b' or 'gpipe' for one."
        )
    return stages_per_device


def actions_of(
    schedule: Schedule, device: int, devices: int, micro_batches: int, stages_per_device: int = 1
) -> list[tuple[int, Action]]:
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
    stages = [device + devices * chunk for chunk in range(stages_per_device)]
    at_once = micro_batches if schedule in ("gpipe", "looped_bfs") else devices
    forwards = _turns(stages, at_once, micro_batches, backward=False)
    backwards = _turns(stages[::-1], at_once, micro_batches, backward=True)
    warm_up = {
        "1f1b": devices - device,
        "interleaved_1f1b": 2 * (devices - device - 1) + (stages_per_device - 1) * devices + 1,
    }.get(schedule, len(forwards))
    actions, waiting = forwards[:warm_up], iter(forwards[warm_up:])
    for backward in backwards:
        actions += [backward, *(forward for forward in [next(waiting, None)] if forward is not None)]
    return [(stage, action) for stage, action in actions if action.micro_batch < micro_batches]


def _turns(stages: Sequence[int], at_once: int, micro_batches: int, *, backward: bool) -> list[tuple[int, Action]]:
    """So many micro-batches through one stage after another, then the next ones; also those that there are not."""
    return [
        (stage, Action(backward, index))
        for first in range(0, micro_batches, at_once)
        for stage in stages
        for index in range(first, first + at_once)
    ]


class Occupancy(NamedTuple):
    """Of how many micro-batches a stage holds the activations.

    Attributes:
        most: At most.
        later: At most once the first backward is done, and gradients are there.
    """

    most: int
    later: int


def occupancy(
    schedule: Schedule, stage: int, devices: int, micro_batches: int, stages_per_device: int = 1
) -> Occupancy:
    """How full a stage becomes; see `actions_of`."""
    held = most = later = 0
    learns = False
    for at, action in actions_of(schedule, stage % devices, devices, micro_batches, stages_per_device):
        if at == stage:
            held += -1 if action.backward else 1
            learns |= action.backward
            most, later = max(most, held), max(later, held * learns)
    return Occupancy(most, later)


def in_flight(schedule: Schedule, stage: int, devices: int, micro_batches: int, stages_per_device: int = 1) -> int:
    """Of how many micro-batches a stage holds the activations at the same time, at most; see `actions_of`."""
    return occupancy(schedule, stage, devices, micro_batches, stages_per_device).most
