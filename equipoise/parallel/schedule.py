"""In which order the stages of a pipeline compute the forwards and backwards of micro-batches.

"gpipe": all forwards, then all backwards (Huang et al., "GPipe", 2019). "1f1b": as many forwards as are needed to fill
the pipeline, then a backward after each forward, so that a stage holds the activations of at most as many micro-batches
as there are stages from it on (Narayanan et al., "PipeDream", 2019; Fan et al., "DAPPLE", 2021).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from equipoise.errors import ConfigurationError

__all__ = [
    "SCHEDULES",
    "Action",
    "Schedule",
    "Span",
    "Timeline",
    "actions_of",
    "check_schedule",
    "in_flight",
    "simulate",
]

Schedule = Literal["gpipe", "1f1b"]
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b")

# Schedules of torch's, and why they are none of ours.
_OTHERS = {
    "zbv": "computes no evaluation in torch, and waits for ever after the error.",
    "dualpipe": "computes no evaluation in torch, and waits for ever after the error.",
    "interleaved": "needs several stages on a device; here each device has one.",
    "looped": "needs several stages on a device; here each device has one.",
}


class Action(NamedTuple):
    """What a stage does next.

    Attributes:
        backward: Whether it is a backward.
        micro_batch: Of which micro-batch.
    """

    backward: bool
    micro_batch: int


class Span(NamedTuple):
    """An action as it ran.

    Attributes:
        stage: The stage.
        action: What it did.
        begin, end: When, in seconds.
    """

    stage: int
    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A step of a pipeline as it ran.

    Attributes:
        spans: All actions, in order of their beginning.
        stages: The number of stages.
    """

    spans: tuple[Span, ...]
    stages: int

    @property
    def seconds(self) -> float:
        """From the first beginning to the last end."""
        return max((span.end for span in self.spans), default=0.0) - min(
            (span.begin for span in self.spans), default=0.0
        )

    @property
    def idle(self) -> float:
        """The share of the stages' time in which they did nothing."""
        busy = sum(span.end - span.begin for span in self.spans)
        whole = self.seconds * self.stages
        return 1 - busy / whole if whole else 0.0


def check_schedule(schedule: str) -> Schedule:
    """The schedule of a name.

    Raises:
        ConfigurationError: If there is none.
    """
    for known in SCHEDULES:
        if schedule == known:
            return known
    why = next((f" {schedule!r} {reason}" for name, reason in _OTHERS.items() if name in str(schedule).lower()), "")
    raise ConfigurationError(f"schedule must be one of {', '.join(map(repr, SCHEDULES))}, not {schedule!r}.{why}")


def actions_of(schedule: Schedule, stage: int, stages: int, micro_batches: int) -> list[Action]:
    """What a stage does in a step.

    Args:
        schedule: The schedule.
        stage: The stage, from 0.
        stages: The number of stages.
        micro_batches: The number of micro-batches; any from 1, with fewer than stages there is only more idling.

    Example:
        >>> "".join("B" if action.backward else "F" for action in actions_of("1f1b", 1, 3, 4))
        'FFBFBFBB'
    """
    forwards = [Action(False, index) for index in range(micro_batches)]
    backwards = [Action(True, index) for index in range(micro_batches)]
    warm_up = in_flight(schedule, stage, stages, micro_batches)
    actions, waiting = forwards[:warm_up], iter(forwards[warm_up:])
    for backward in backwards:
        actions += [backward, *(forward for forward in [next(waiting, None)] if forward is not None)]
    return actions


def in_flight(schedule: Schedule, stage: int, stages: int, micro_batches: int) -> int:
    """Of how many micro-batches a stage holds the activations at the same time, at most."""
    return micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage)


def simulate(schedule: Schedule, forward: Sequence[float], backward: Sequence[float], micro_batches: int) -> Timeline:
    """When everything would run if actions took a known time and nothing else did.

    Args:
        schedule: The schedule.
        forward: For each stage the seconds of the forward of one micro-batch.
        backward: The same for the backward.
        micro_batches: The number of micro-batches.

    Example:
        >>> round(simulate("gpipe", [1, 1], [1, 1], 3).idle, 3)  # (p - 1) / (m + p - 1)
        0.25
    """
    stages = len(forward)
    waiting = [actions_of(schedule, stage, stages, micro_batches) for stage in range(stages)]
    done: dict[tuple[int, Action], float] = {}
    free, spans = [0.0] * stages, []
    while any(waiting):
        for stage in range(stages):
            while waiting[stage]:
                action = waiting[stage][0]
                needed = _needs(stage, action, stages)
                if needed is not None and needed not in done:
                    break
                begin = max(free[stage], 0.0 if needed is None else done[needed])
                end = begin + (backward if action.backward else forward)[stage]
                spans.append(Span(stage, action, begin, end))
                done[stage, action] = free[stage] = end
                waiting[stage].pop(0)
    return Timeline(tuple(sorted(spans, key=lambda span: span.begin)), stages)


def _needs(stage: int, action: Action, stages: int) -> tuple[int, Action] | None:
    """What must have been done before, and where."""
    if action.backward:
        return (stage, Action(False, action.micro_batch)) if stage == stages - 1 else (stage + 1, action)
    return (stage - 1, action) if stage else None
