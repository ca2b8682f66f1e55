"""Timeline of a pipeline's step, measured or simulated, with its bubbles."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from equipoise.pipeline.schedule.schedule import Action, Schedule, actions_of, lets_go, needed_for

__all__ = ["Span", "Timeline", "simulate"]


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
        stages_per_device: How many of them each device has. Default: 1.
    """

    spans: tuple[Span, ...]
    stages: int
    stages_per_device: int = 1

    @property
    def devices(self) -> int:
        """The number of devices; stage s is computed by device s modulo that."""
        return self.stages // self.stages_per_device

    @property
    def seconds(self) -> float:
        """From the first beginning to the last end."""
        return max((span.end for span in self.spans), default=0.0) - min(
            (span.begin for span in self.spans), default=0.0
        )

    @property
    def idle(self) -> float:
        """The share of the devices' time in which they did nothing."""
        busy = sum(span.end - span.begin for span in self.spans)
        whole = self.seconds * self.devices
        return 1 - busy / whole if whole else 0.0


def simulate(
    schedule: Schedule,
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    stages_per_device: int = 1,
) -> Timeline:
    """When everything would run if actions took a known time and nothing else did.

    Args:
        schedule: The schedule.
        forward: For each stage the seconds of the forward of one micro-batch.
        backward: The same for the backward, of which each part takes half where there are two.
        micro_batches: The number of micro-batches.
        stages_per_device: How many stages each device has. Default: 1.

    Example:
        >>> round(simulate("gpipe", [1, 1], [1, 1], 3).idle, 3)  # (p - 1) / (m + p - 1)
        0.25
        >>> round(simulate("interleaved_1f1b", [1] * 4, [1] * 4, 4, 2).idle, 3)  # (p - 1) / (v m + p - 1)
        0.111
    """

    def seconds(stage: int, action: Action) -> float:
        whole = not action.backward or (lets_go(schedule, action) and not action.weights)
        return (backward if action.backward else forward)[stage] * (1.0 if whole else 0.5)

    stages = len(forward)
    devices = stages // stages_per_device
    waiting = [actions_of(schedule, device, devices, micro_batches, stages_per_device) for device in range(devices)]
    done: dict[tuple[int, Action], float] = {}
    free, spans = [0.0] * devices, list[Span]()
    while any(waiting):
        before = len(spans)
        for device in range(devices):
            while waiting[device]:
                stage, action = waiting[device][0]
                needed = needed_for(stage, action, stages)
                if needed is not None and needed not in done:
                    break
                begin = max(free[device], 0.0 if needed is None else done[needed])
                end = begin + seconds(stage, action)
                spans.append(Span(stage, action, begin, end))
                done[stage, action] = free[device] = end
                waiting[device].pop(0)
        assert len(spans) > before, "every device waits"
    return Timeline(tuple(sorted(spans, key=lambda span: span.begin)), stages, stages_per_device)
