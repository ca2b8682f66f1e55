"""Timeline of a pipeline's step, measured or simulated, with its bubbles."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from equipoise.extensions.pipeline.schedule.schedule import (
    Action,
    Schedule,
    Task,
    actions_of,
    needed_for,
    releases_activations,
)

__all__ = ["Span", "Timeline", "simulate"]


class Span(NamedTuple):
    """An action as it ran.

    Attributes:
        stage: Index of the stage.
        action: Its action.
        begin, end: Times in seconds.
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
        stages: Number of stages.
        stages_per_device: Number of stages on each device. Default: 1.
    """

    spans: tuple[Span, ...]
    stages: int
    stages_per_device: int = 1

    @property
    def devices(self) -> int:
        """Number of devices; stage s is computed by device s modulo that."""
        return self.stages // self.stages_per_device

    @property
    def seconds(self) -> float:
        """Seconds from the first beginning to the last end."""
        if not self.spans:
            return 0.0
        last_end = max(span.end for span in self.spans)
        first_begin = min(span.begin for span in self.spans)
        return last_end - first_begin

    @property
    def idle(self) -> float:
        """The bubble: share of the devices' time in which they wait, from 0 to 1."""
        available = self.seconds * self.devices
        if not available:
            return 0.0
        busy = sum(span.end - span.begin for span in self.spans)
        return 1 - busy / available


def simulate(
    schedule: Schedule,
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    stages_per_device: int = 1,
) -> Timeline:
    """Return the timeline of a step if actions took these times and nothing else took any.

    Args:
        schedule: The schedule.
        forward: For each stage the seconds of the forward of one micro-batch.
        backward: The same for the backward. Each half of a split backward takes half of it.
        micro_batches: Number of micro-batches.
        stages_per_device: Number of stages on each device. Default: 1.

    Example:
        >>> round(simulate("gpipe", [1, 1], [1, 1], 3).idle, 3)  # (p - 1) / (m + p - 1)
        0.25
        >>> round(simulate("interleaved_1f1b", [1] * 4, [1] * 4, 4, 2).idle, 3)  # (p - 1) / (v m + p - 1)
        0.111
    """

    def seconds(stage: int, action: Action) -> float:
        if not action.backward:
            return forward[stage]
        is_half = action.weights or not releases_activations(schedule, action)
        if is_half:
            return 0.5 * backward[stage]
        return backward[stage]

    stages = len(forward)
    devices = stages // stages_per_device
    waiting: list[deque[Task]] = []
    for device in range(devices):
        actions = actions_of(schedule, device, devices, micro_batches, stages_per_device)
        waiting.append(deque(actions))

    # The end of each task that is done, and of the last task of each device.
    ends: dict[Task, float] = {}
    free = [0.0] * devices
    spans: list[Span] = []
    while any(waiting):
        spans_before = len(spans)
        # Let each device run until it needs a result that does not exist yet.
        for device in range(devices):
            while waiting[device]:
                task = waiting[device][0]
                stage, action = task
                needed = needed_for(stage, action, stages)
                if needed is not None and needed not in ends:
                    break
                begin = free[device]
                if needed is not None:
                    begin = max(begin, ends[needed])
                end = begin + seconds(stage, action)
                spans.append(Span(stage, action, begin, end))
                ends[task] = end
                free[device] = end
                waiting[device].popleft()
        assert len(spans) > spans_before, "every device waits"

    spans.sort(key=lambda span: span.begin)
    return Timeline(tuple(spans), stages, stages_per_device)
