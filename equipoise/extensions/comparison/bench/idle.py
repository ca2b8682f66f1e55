"""The share of the devices' time in a step in which they wait, from one step under torch's profiler.

- On CUDA it is the time in which no kernel runs on a device.
- Of processes on the CPU it is the time in which the thread that trains does not compute.
- Devices of one process on the CPU compute their parts one after another. The share is what it would be if they
  computed at the same time: all wait for the slowest part, and for what one of them does alone.
- Of a pipeline on the CPU it is the bubble of its schedule, with the measured times of its stages.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from equipoise.extensions.common.timeline import Timeline
from equipoise.extensions.pipeline.schedule.schedule import Schedule
from equipoise.extensions.pipeline.schedule.simulation import simulate
from equipoise.memory.profile.places import DevicePlaces
from equipoise.parallel.device_work import observe_devices

__all__ = ["StepProfile", "idle_in_parallel", "idle_of_kernels", "idle_of_schedule"]

# Name of the profiler's events that run one node of a backward.
_NODE = "autograd::engine::evaluate_function"


class StepProfile:
    """One step under the profiler, from the construction to `idle`.

    Args:
        devices: Devices of this process.
        root: Number of the device on which the rest of a step runs.
        is_alone: Whether no other process computes with this one.
    """

    def __init__(self, devices: Sequence[torch.device], root: int, *, is_alone: bool) -> None:
        self._devices = list(devices)
        self._is_alone = is_alone
        places = DevicePlaces([str(number) for number in range(len(devices))], root)
        self._clock = _ForwardClock(places)
        self._profiler: Any = None
        self._is_running = False
        self._observes = False
        if self._is_on_cuda:
            self._start([ProfilerActivity.CPU, ProfilerActivity.CUDA])
        elif is_alone and len(devices) > 1:
            observe_devices(self._clock)
            self._observes = True
            self._start([ProfilerActivity.CPU])
        self._begin = perf_counter()
        self._begin_of_thread = thread_time()

    @property
    def _is_on_cuda(self) -> bool:
        return self._devices[0].type == "cuda"

    def _start(self, activities: Iterable[ProfilerActivity]) -> None:
        self._profiler = profile(activities=activities, acc_events=True)
        self._profiler.start()
        self._is_running = True

    def idle(self, strategy: Any) -> float | None:
        """End the step and return the share; None where no device waits for another one."""
        seconds = perf_counter() - self._begin
        own_seconds = thread_time() - self._begin_of_thread
        self.stop()
        if self._is_on_cuda:
            return idle_of_kernels(self._profiler.events(), self._devices, seconds)
        if not self._is_alone:
            return max(0.0, 1 - own_seconds / seconds)
        if len(self._devices) < 2:
            return None
        timeline = getattr(strategy, "timeline", None)
        if timeline is not None:
            return idle_of_schedule(timeline, strategy.schedule)
        return idle_in_parallel(self._clock.seconds, self._backwards(), seconds, len(self._devices))

    def stop(self) -> None:
        """End the recording; may be called twice."""
        if self._observes:
            self._observes = False
            observe_devices(None)
        if self._is_running:
            self._is_running = False
            self._profiler.stop()

    def _backwards(self) -> dict[int, float]:
        """Return the seconds that each device's part of the backward takes."""
        seconds: dict[int, float] = defaultdict(float)
        for event in self._profiler.events():
            if not event.name.startswith(_NODE):
                continue
            index = self._clock.places.computing_device(event.sequence_nr)
            if index is not None:
                seconds[index] += (event.time_range.end - event.time_range.start) / 1e6
        return seconds


class _ForwardClock:
    """Measures the forward of each device. It is a `DeviceObserver`."""

    def __init__(self, places: DevicePlaces) -> None:
        self.places = places
        self.seconds: dict[int, float] = defaultdict(float)

    @contextmanager
    def computing_on(self, index: int) -> Iterator[None]:
        """Measure a part; see `DeviceObserver`."""
        begin = perf_counter()
        try:
            with self.places.computing_on(index):
                yield
        finally:
            self.seconds[index] += perf_counter() - begin

    def in_helper_thread(self) -> AbstractContextManager[None]:
        """Measure nothing; see `DeviceObserver`."""
        return nullcontext()

    def note_placed(self, tensor: Tensor, index: int) -> None:
        """Ignore the tensor; see `DeviceObserver`."""


def idle_in_parallel(
    forwards: Mapping[int, float], backwards: Mapping[int, float], seconds: float, devices: int
) -> float:
    """Return the share of the devices' time in which they would wait if they computed their parts at the same time.

    Args:
        forwards: Seconds of each device's part of the forward.
        backwards: Seconds of each device's part of the backward.
        seconds: Seconds of the step, in which the parts were computed one after another.
        devices: Number of devices. One of them does all the rest.

    Example:
        >>> idle_in_parallel({0: 1.0, 1: 1.0}, {0: 2.0, 1: 2.0}, 6.0, devices=2)
        0.0
        >>> round(idle_in_parallel({0: 1.0, 1: 1.0}, {}, 4.0, devices=2), 3)  # one device does two seconds more
        0.333
    """
    busy = sum(forwards.values()) + sum(backwards.values())
    rest = max(0.0, seconds - busy)
    length = rest + max(forwards.values(), default=0.0) + max(backwards.values(), default=0.0)
    if not length:
        return 0.0
    return 1 - (busy + rest) / (length * devices)


def idle_of_kernels(events: Iterable[Any], devices: Sequence[torch.device], seconds: float) -> float:
    """Return the share of time in which no kernel runs.

    Args:
        events: Events of torch's profiler, with times in microseconds.
        devices: The CUDA devices of this process.
        seconds: Seconds of the step.
    """
    intervals: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event.device_type.name != "CUDA":
            continue
        intervals[event.device_index].append((event.time_range.start, event.time_range.end))
    numbers = {device.index or 0 for device in devices}
    busy = sum(_covered(intervals[number]) for number in numbers) / 1e6
    return max(0.0, 1 - busy / (seconds * len(numbers)))


def _covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    length = 0.0
    last = float("-inf")
    for begin, end in sorted(intervals):
        length += max(0.0, end - max(begin, last))
        last = max(last, end)
    return length


def idle_of_schedule(timeline: Timeline, schedule: Schedule) -> float:
    """Return the bubble of a schedule, from a step whose stages were computed one after another.

    Args:
        timeline: The step, whose times are those of the stages.
        schedule: The schedule.
    """
    if not timeline.spans:
        return 0.0
    forward = [0.0] * timeline.stages
    backward = [0.0] * timeline.stages
    for span in timeline.spans:
        seconds = span.end - span.begin
        if span.action.backward:
            backward[span.stage] += seconds
        else:
            forward[span.stage] += seconds
    micro_batches = 1 + max(span.action.micro_batch for span in timeline.spans)
    # The simulation takes the times of one micro-batch.
    forward = [seconds / micro_batches for seconds in forward]
    backward = [seconds / micro_batches for seconds in backward]
    return simulate(schedule, forward, backward, micro_batches, timeline.stages_per_device).idle
