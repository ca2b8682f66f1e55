"""Compute the micro-batches of a step in the stages of one process, with a thread for each device.

Values between stages are detached, so every stage has a graph of its own for each micro-batch, and returns its inputs'
gradients to the stage before. If all devices are different, each has a thread that works through the device's list of
actions, and the devices compute at the same time. If some are the same, one thread computes everything in a fixed
order: several would not be faster, and so random numbers are drawn in the same order every time.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from equipoise.extensions.common.timeline import Action, Span, Timeline
from equipoise.extensions.pipeline.execution.stage_actions import forward_of_steps, run_action
from equipoise.extensions.pipeline.execution.stage_graphs import StageGraphs, move_values, run_backward
from equipoise.extensions.pipeline.execution.suspended_step import SuspendedStep, inside_stage
from equipoise.extensions.pipeline.graph.stages import StageProgram
from equipoise.extensions.pipeline.schedule.schedule import Schedule, Task, actions_of, receives, splits
from equipoise.parallel.device_work import computing_on, on_device
from equipoise.parallel.replicas.device_threads import ThreadState

__all__ = ["Compute", "Pipeline", "StepRun"]

# Computes an action of a stage from what another stage has passed on, and returns what it passes on itself.
Compute = Callable[[int, Action, Any], Any]


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
                    values = stage.run(*move_values(values, before, device))
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
        run = StepRun(self, inputs, self._computation(steps, inputs, backward, pipelines))
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

    def _computation(
        self,
        steps: Sequence[SuspendedStep],
        inputs: Sequence[Sequence[Tensor]],
        backward: Callable[[int], None],
        pipelines: Sequence["Pipeline"],
    ) -> Compute:
        """Return how a stage computes; see `run` for the arguments."""
        graphs = {}
        before = self.devices[0]
        for stage, device in enumerate(self.devices):
            graphs[stage] = StageGraphs(device, before, split=splits(self.schedule))
            before = device
        last = len(self.devices) - 1
        forward = forward_of_steps(graphs, steps, lambda stage, index: pipelines[index].stages[stage], last)

        def compute(stage: int, action: Action, received: Any) -> Any:
            loss_backward = backward if stage == last else None
            result = run_action(graphs[stage], stage, action, received, forward, loss_backward)
            if stage == 0 and action.backward and not action.weights:
                # The step may have computed the inputs from parameters.
                run_backward(inputs[action.micro_batch], result)
            return result

        return compute

    def note_failure(self, device: torch.device) -> None:
        """Record the device of a failed stage. The first failure counts."""
        if self.failed is None:
            self.failed = device


class StepRun:
    """One step in all stages.

    Args:
        pipeline: The stages.
        inputs: For each micro-batch the tensors of its call of the network.
        compute: Computes an action of a stage.

    Attributes:
        spans: The actions as they ran.
    """

    def __init__(self, pipeline: Pipeline, inputs: Sequence[Sequence[Tensor]], compute: Compute) -> None:
        self._pipeline = pipeline
        self._compute = compute
        self._micro_batches = len(inputs)
        self._last = len(pipeline.devices) - 1
        self._errors: list[BaseException] = []
        self.spans: list[Span] = []

        # For the forwards and the backwards of each stage, the values that it will receive, in the order of
        # micro-batches. None ends its thread.
        self._values: dict[tuple[int, bool], queue.SimpleQueue[Any]] = {}
        for stage in range(len(pipeline.devices)):
            for backward in (False, True):
                self._values[stage, backward] = queue.SimpleQueue()
        for tensors in inputs:
            self._values[0, False].put([tuple(tensors)])

    def _actions_of(self, device: int) -> list[Task]:
        """Return the actions of a device, given its index."""
        plan = (self._pipeline.num_devices, self._micro_batches, self._pipeline.stages_per_device)
        return actions_of(self._pipeline.schedule, device, *plan)

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
        return not receives(stage, action, self._last) or not self._values[stage, action.backward].empty()

    def in_threads(self) -> None:
        """Compute in a thread for each device. This thread is the last device's."""
        # New threads begin with torch's defaults.
        state = ThreadState.capture(("cpu", "cuda"))
        last = self._pipeline.num_devices - 1
        threads = []
        for device in range(last):
            name = f"equipoise-stage-{device}"
            threads.append(threading.Thread(target=self._work, args=(device, state), name=name, daemon=True))
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
        for values in self._values.values():
            values.put(None)

    # Actions.

    def compute(self, stage: int, action: Action) -> None:
        """Run one action."""
        device = self._pipeline.devices[stage]
        received: Any = None
        if receives(stage, action, self._last):
            received = self._values[stage, action.backward].get()
            if received is None:
                raise _Ended
        begin = perf_counter()
        try:
            with on_device(device), computing_on(stage % self._pipeline.num_devices):
                result = self._compute(stage, action, received)
        except BaseException as error:
            self._pipeline.note_failure(device)
            error.add_note(f"This was stage {stage} of the pipeline, on {device}.")
            raise
        self.spans.append(Span(stage, action, begin, perf_counter()))

        # What it returns goes to the stage that needs it, if there is one.
        receiver = stage - 1 if action.backward else stage + 1
        if not action.weights and 0 <= receiver <= self._last:
            self._values[receiver, action.backward].put(result)


class _Ended(Exception):
    """Ends a thread after another stage has failed."""
