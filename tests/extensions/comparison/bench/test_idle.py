"""The share of time in which devices wait."""

from collections import namedtuple
from typing import Any

import pytest
import torch

from equipoise.extensions.common.timeline import Timeline
from equipoise.extensions.comparison.bench.idle import idle_of_kernels, idle_of_schedule
from equipoise.extensions.pipeline.schedule.simulation import simulate

# Events of a device, in place of those of torch's profiler, which no machine without one records.
Kind = namedtuple("Kind", "name")
Range = namedtuple("Range", "start end")
Event = namedtuple("Event", "device_type device_index time_range")


def kernel(device: int, start: float, end: float, kind: str = "CUDA") -> Any:
    """Return an event with times in microseconds."""
    return Event(Kind(kind), device, Range(start, end))


@pytest.mark.parametrize(
    ("events", "devices", "idle"),
    [
        ([], 1, 1.0),
        ([kernel(0, 0, 5e5)], 1, 0.5),
        # Kernels of several streams overlap; one lies within another.
        ([kernel(0, 0, 5e5), kernel(0, 1e5, 2e5), kernel(0, 4e5, 8e5)], 1, 0.2),
        # What the host does, and other devices, do not count.
        ([kernel(0, 0, 5e5), kernel(0, 5e5, 1e6, "CPU"), kernel(1, 0, 1e6)], 1, 0.5),
        ([kernel(0, 0, 5e5), kernel(1, 0, 1e6)], 2, 0.25),
        # The clocks of a device and of the host differ a little.
        ([kernel(0, -1e3, 1.1e6)], 1, 0.0),
    ],
)
def test_idle_time_is_that_without_kernels(events: list[Any], devices: int, idle: float) -> None:
    names = [torch.device("cuda", index) for index in range(devices)]
    assert idle_of_kernels(events, names, seconds=1.0) == pytest.approx(idle, abs=1e-12)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_of_stages_that_were_computed_one_after_another(schedule: Any) -> None:
    """It is that of the same stages at the same time."""
    forward, backward = [1.0, 2.0], [2.0, 3.0]
    at_once = simulate(schedule, forward, backward, 4)
    begin = 0.0
    spans = []
    for span in at_once.spans:
        seconds = span.end - span.begin
        spans.append(span._replace(begin=begin, end=begin + seconds))
        begin += seconds
    in_turn = Timeline(tuple(spans), stages=2)
    assert in_turn.idle == pytest.approx(0.5)
    assert idle_of_schedule(in_turn, schedule) == pytest.approx(at_once.idle, rel=1e-12)


def test_a_step_without_spans_has_no_bubble() -> None:
    assert idle_of_schedule(Timeline((), stages=2), "gpipe") == 0.0
