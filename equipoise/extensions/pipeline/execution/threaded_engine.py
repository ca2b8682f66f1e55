"""Compute the micro-batches of a step in the stages of one process, with a thread for each device.

Values between stages are detached, so every stage has a graph of its own for each micro-batch, and returns its inputs'
gradients to the stage before. If all devices are different, each has a thread that works through the device's list of
actions, and the devices compute at the same time. If some are the same, one thread computes everything in a fixed
order: several would not be faster, and so random numbers are drawn in the same order every time.
"""

import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from equipoise.extensions.pipeline.execution.stage_graphs import StageGraphs, move_values, run_backward
from equipoise.extensions.pipeline.execution.suspended_step import SuspendedStep, inside_stage
from equipoise.extensions.pipeline.graph.stages import StageProgram
from equipoise.extensions.pipeline.schedule.schedule import Action, Schedule, Task, actions_of, splits
from equipoise.extensions.pipeline.schedule.timeline import Span, Timeline
from equipoise.parallel.device_work import computing_on, on_device
from equipoise.parallel.replicas.device_threads import ThreadState

__all__ = ["Pipeline", "StepRun"]


class Pipeline:
    """Stages on the devices of one process.

    Args:
        stages: The stages, for calls of one structure.
        devices: The device of each stage. With p devices, stage s has the device of stage s modulo p.
        schedule: Order of the computations; see `schedule.schedule`.
        stages_per_device: Number of stages on each device. Default: 1.
        threads: Whether each device has a thread. Default: None, if no two devices are the same.

    Attributes:
        failed: Device of the stage in which the last call failed; None if it has not.
        timeline: The last step as it ran, in the time of this process. What devices compute later is not in it.
    """

    def __init__(
        self,
        stages: Sequence[StageProgram],
        devices: Sequence[torch.device],
        schedule: Schedule,
        *,
        stages_per_device: int = 1,
        threads: bool | None = None,
    ) -> None:
        self.stages = list(stages)
        self.devices = list(devices)
        self.schedule: Schedule = schedule
        self.stages_per_device = stages_per_device
        self.num_devices = len(devices) // stages_per_device
        if threads is None:
            threads = len(set(devices)) == self.num_devices > 1
        self.threads = threads
        self.timeline = Timeline((), len(devices), stages_per_device)
        self.failed: torch.device | None = None

    def forward(self, tensors: Sequence[Tensor]) -> Any:
        """Return the network's output for one call. Gradients flow through all stages, as through any forward.

        Args:
            tensors: The tensors of the call.
        """
        values: Any = [tuple(tensors)]
        self.failed = None
        before = self.devices[0]
        for stage, device in zip(self.stages, self.devices, strict=True):
            try:
                with on_device(device), inside_stage():
                    inputs = move_values(values, before, device)
                    values = stage.run(*inputs)
            except BaseException:
                self.failed = device
                raise
            before = device
        return values

    def run(
        self,
        steps: Sequence[SuspendedStep],
        inputs: Sequence[Sequence[Tensor]],
        backward: Callable[[int], None],
        pipelines: Sequence["Pipeline"],
    ) -> None:
        """Compute micro-batches, each to the end of its step, and then backward.

        Args:
            steps: The steps, each of which waits for the network's output.
            inputs: For each step the tensors of its call of the network.
            backward: Runs the backward of a step that has ended, down to the inputs of the last stage, given the index
                of its micro-batch.
            pipelines: For each micro-batch the stages of its call's structure.
        """
        self.failed = None
        # A step that did not end waits in its thread, so every error must abandon it.
        run = self._new_run(steps, inputs, backward, pipelines)
        try:
            if self.threads:
                run.in_threads()
            else:
                run.in_turn()
        except BaseException:
            for step in steps:
                step.abandon()
            raise
        spans = sorted(run.spans, key=lambda span: span.begin)
        self.timeline = Timeline(tuple(spans), len(self.devices), self.stages_per_device)

    def _new_run(
        self,
        steps: Sequence[SuspendedStep],
        inputs: Sequence[Sequence[Tensor]],
        backward: Callable[[int], None],
        pipelines: Sequence["Pipeline"],
    ) -> "StepRun":
        programs = [pipeline.stages for pipeline in pipelines]
        return _TracedRun(self, steps, inputs, backward, programs)

    def note_failure(self, device: torch.device) -> None:
        """Record the device of a failed stage. The first failure counts."""
        if self.failed is None:
            self.failed = device


class StepRun(ABC):
    """One step in all stages. Derived classes say how a stage computes.

    Args:
        pipeline: The stages.
        steps, inputs, backward: See `Pipeline.run`.

    Attributes:
        spans: The actions as they ran.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        steps: Sequence[SuspendedStep],
        inputs: Sequence[Sequence[Tensor]],
        backward: Callable[[int], None],
    ) -> None:
        self._pipeline = pipeline
        self._steps = steps
        self._backward = backward
        self._last = len(pipeline.devices) - 1
        self._errors: list[BaseException] = []
        self.spans: list[Span] = []

        # For each stage the values that it will receive, in the order of micro-batches. None ends its thread.
        self._forwards = [queue.SimpleQueue[Any]() for _ in pipeline.devices]
        self._backwards = [queue.SimpleQueue[Any]() for _ in pipeline.devices]
        for tensors in inputs:
            self._forwards[0].put([tuple(tensors)])

    def _actions_of(self, device: int) -> list[Task]:
        """Return the actions of a device, given its index."""
        pipeline = self._pipeline
        count = len(self._steps)
        return actions_of(pipeline.schedule, device, pipeline.num_devices, count, pipeline.stages_per_device)

    # Threads.

    def in_turn(self) -> None:
        """Compute everything in this thread, on any device that has its values."""
        remaining = [deque(self._actions_of(device)) for device in range(self._pipeline.num_devices)]
        while any(remaining):
            for actions in remaining:
                while actions and self._is_ready(*actions[0]):
                    stage, action = actions.popleft()
                    self.compute(stage, action)

    def _is_ready(self, stage: int, action: Action) -> bool:
        source = self._source_of(stage, action)
        return source is None or not source.empty()

    def in_threads(self) -> None:
        """Compute in a thread for each device. This thread is the last device's."""
        # New threads begin with torch's defaults.
        state = ThreadState.capture(("cpu", "cuda"))
        last = self._pipeline.num_devices - 1
        threads = []
        for device in range(last):
            thread = threading.Thread(
                target=self._work,
                args=(device, state),
                name=f"equipoise-stage-{device}",
                daemon=True,
            )
            threads.append(thread)
        try:
            for thread in threads:
                thread.start()
            self._work(last, state)
            for thread in threads:
                thread.join()
        except BaseException:
            # An interrupt while this thread waits, or an error of `start`: the system has no more threads.
            self._end()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            raise
        if self._errors:
            try:
                raise self._errors[0]
            finally:
                # Their tracebacks refer to this frame.
                self._errors.clear()

    def _work(self, device: int, state: ThreadState) -> None:
        try:
            with state.entered():
                for stage, action in self._actions_of(device):
                    self.compute(stage, action)
        except _Ended:
            pass
        except BaseException as error:
            self._errors.append(error)
            self._end()

    def _end(self) -> None:
        """End all threads that wait for a value."""
        for values in (*self._forwards, *self._backwards):
            values.put(None)

    # Actions.

    def _source_of(self, stage: int, action: Action) -> "queue.SimpleQueue[Any] | None":
        """Return the queue of the values that an action needs; None if it needs none."""
        if action.weights:
            return None
        if not action.backward:
            return self._forwards[stage]
        if stage == self._last:
            # Its backward begins with the loss.
            return None
        return self._backwards[stage]

    def compute(self, stage: int, action: Action) -> None:
        """Run one action."""
        device = self._pipeline.devices[stage]
        received: Any = None
        source = self._source_of(stage, action)
        if source is not None:
            received = source.get()
            if received is None:
                raise _Ended
        begin = perf_counter()
        try:
            with on_device(device), computing_on(stage % self._pipeline.num_devices):
                if action.weights:
                    self._run_weights(stage, action.micro_batch)
                elif action.backward:
                    self._run_backward(stage, action.micro_batch, received)
                else:
                    self._run_forward(stage, action.micro_batch, received)
        except BaseException as error:
            self._pipeline.note_failure(device)
            error.add_note(f"This was stage {stage} of the pipeline, on {device}.")
            raise
        self.spans.append(Span(stage, action, begin, perf_counter()))

    @abstractmethod
    def _run_forward(self, stage: int, index: int, received: Any) -> None:
        """Compute a stage for a micro-batch, and pass its values on.

        Args:
            stage: The stage.
            index: Index of the micro-batch.
            received: Value that the stage before has passed on.
        """

    @abstractmethod
    def _run_backward(self, stage: int, index: int, received: Any) -> None:
        """Run the backward of a stage, and pass gradients on to the stage before.

        Args:
            stage: The stage.
            index: Index of the micro-batch.
            received: Value that the next stage has passed on; None for the last stage.
        """

    @abstractmethod
    def _run_weights(self, stage: int, index: int) -> None:
        """Compute the gradients of a stage's weights, which a split backward leaves for later."""


class _TracedRun(StepRun):
    """One step in stages that consist of recorded calls."""

    def __init__(
        self,
        pipeline: Pipeline,
        steps: Sequence[SuspendedStep],
        inputs: Sequence[Sequence[Tensor]],
        backward: Callable[[int], None],
        programs: Sequence[Sequence[StageProgram]],
    ) -> None:
        super().__init__(pipeline, steps, inputs, backward)
        self._inputs = inputs
        self._programs = programs
        split = splits(pipeline.schedule)
        self._graphs = []
        before = pipeline.devices[0]
        for device in pipeline.devices:
            self._graphs.append(StageGraphs(device, before, split=split))
            before = device

    def _run_forward(self, stage: int, index: int, received: Any) -> None:
        """See `StepRun`: the values are the outputs of the stage."""
        inputs: list[Any] = received
        step = self._steps[index]
        program = self._programs[index][stage]
        is_last = stage == self._last
        assert step.state is not None
        # The step's thread has the last device as its current one, this stage has its own.
        with step.state.entered(), on_device(self._pipeline.devices[stage]):
            outputs = self._graphs[stage].forward(index, program, inputs, keep=True, last=is_last)
        if is_last:
            step.resume(outputs)
        else:
            self._forwards[stage + 1].put(outputs)

    def _run_backward(self, stage: int, index: int, received: Any) -> None:
        """See `StepRun`: the values are gradients of the stage's outputs; the loss provides those of the last stage."""
        gradients = received
        if gradients is None:
            gradients = partial(self._backward, index)
        input_gradients = self._graphs[stage].backward(index, gradients)
        if stage > 0:
            self._backwards[stage - 1].put(input_gradients)
        else:
            # The step may have computed the inputs from parameters.
            run_backward(self._inputs[index], input_gradients)

    def _run_weights(self, stage: int, index: int) -> None:
        """See `StepRun`."""
        self._graphs[stage].weights(index)


class _Ended(Exception):
    """Ends a thread after another stage has failed."""
