"""Simulation of a pipeline's step by the times of its actions."""

from collections import deque
from collections.abc import Sequence

from equipoise.extensions.common.timeline import Action, Span, Timeline
from equipoise.extensions.pipeline.schedule.schedule import Schedule, Task, actions_of, needed_for, splits

__all__ = ["simulate"]


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
        if splits(schedule):
            return 0.5 * backward[stage]
        return backward[stage]

    stages = len(forward)
    devices = stages // stages_per_device
    waiting: list[deque[Task]] = [
        deque(actions_of(schedule, device, devices, micro_batches, stages_per_device)) for device in range(devices)
    ]

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
