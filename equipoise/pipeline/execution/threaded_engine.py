"""Compute the micro-batches of a step in the stages of one process, with a thread for each device.

Between stages values are detached, so every stage has a graph of its own for each micro-batch, and hands its inputs'
gradients back to the stage before. Where all devices are different ones each has a thread, which works through the
device's list of actions, and devices compute at the same time. Where some are the same one thread does everything in a
fixed order: that would not be quicker otherwise, and random numbers are drawn in the same order every time.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from equipoise.parallel.replicas.device_threads import ThreadState, on_device
from equipoise.pipeline.execution.stage_graphs import StageGraphs, brought, run_backward
from equipoise.pipeline.execution.suspended_step import SuspendedStep, inside_stage
from equipoise.pipeline.graph.stages import StageProgram
from equipoise.pipeline.schedule.schedule import Action, Schedule, actions_of, splits
from equipoise.pipeline.schedule.timeline import Span, Timeline

__all__ = ["Pipeline"]


class Pipeline:
    """Stages on devices.

    Args:
        stages: The stages, for calls of one structure.
        devices: The device of each. With p devices, stage s has the one of stage s modulo p.
        schedule: See `parallel.schedule`.
        stages_per_device: How many stages each device has. Default: 1.
        threads: Whether each device has a thread. Default: if no two of them are the same.

    Attributes:
        failed: The device of the stage in which the last call failed; None if it has not.
        timeline: The last step as it ran, in the time of this process; what devices do later is not in it.
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
        self.stages, self.devices, self.schedule = list(stages), list(devices), schedule
        self.stages_per_device, self.count = stages_per_device, len(devices) // stages_per_device
        several = len(set(devices)) == self.count > 1
        self.threads = several if threads is None else threads
        self.timeline = Timeline((), len(stages), stages_per_device)
        self.failed: torch.device | None = None

    def forward(self, tensors: Sequence[Tensor]) -> Any:
        """One call of the network, stage after stage; gradients pass through it as through any forward."""
        values: Any = [tuple(tensors)]
        self.failed, before = None, self.devices[0]
        for stage, device in zip(self.stages, self.devices, strict=True):
            try:
                with on_device(device), inside_stage():
                    values = stage.run(*brought(values, before, device))
            except BaseException:
                self.failed = device
                raise
            before = device
        return values

    def run(
        self,
        steps: Sequence[SuspendedStep],
        inputs: Sequence[Sequence[Tensor]],
        backward: Callable[[int], None] | None,
        pipelines: Sequence["Pipeline"] | None = None,
    ) -> None:
        """Computes micro-batches, each to the end of its step and then backward.

        Args:
            steps: The steps, each waiting for the network's output.
            inputs: The tensors of its call of the network.
            backward: Runs the backward of a step that has ended, down to the inputs of the last stage. None: there is
                no backward.
            pipelines: For each micro-batch its own, where calls are of several structures. Default: always this.
        """
        self.failed = None
        programs = [pipeline.stages for pipeline in pipelines or [self] * len(steps)]
        run = _Run(self, steps, inputs, backward, programs)
        try:
            if self.threads:
                run.in_threads()
            else:
                run.in_turn()
        except BaseException:
            for step in steps:
                step.abandon()
            raise
        spans = tuple(sorted(run.spans, key=lambda span: span.begin))
        self.timeline = Timeline(spans, len(self.stages), self.stages_per_device)


class _Run:
    """One step of the trainer."""

    def __init__(
        self,
        pipeline: Pipeline,
        steps: Sequence[SuspendedStep],
        inputs: Sequence[Sequence[Tensor]],
        backward: Callable[[int], None] | None,
        programs: Sequence[Sequence[StageProgram]],
    ) -> None:
        self.programs = programs
        self.pipeline, self.steps, self.inputs, self.backward = pipeline, steps, inputs, backward
        self.count = len(pipeline.stages)
        # What passes between stages, in the order of micro-batches; None in it ends whoever waits.
        self.forwards = [queue.SimpleQueue[Any]() for _ in range(self.count)]
        self.backwards = [queue.SimpleQueue[Any]() for _ in range(self.count)]
        befores = [pipeline.devices[0], *pipeline.devices]
        split = splits(pipeline.schedule)
        self.graphs = [
            StageGraphs(device, before, split=split) for device, before in zip(pipeline.devices, befores, strict=False)
        ]
        self.spans: list[Span] = []
        self.errors: list[BaseException] = []
        for tensors in inputs:
            self.forwards[0].put([tuple(tensors)])

    def actions(self, device: int) -> list[tuple[int, Action]]:
        pipeline = self.pipeline
        actions = actions_of(pipeline.schedule, device, pipeline.count, len(self.steps), pipeline.stages_per_device)
        return actions if self.backward is not None else [each for each in actions if not each[1].backward]

    # Who computes.

    def in_turn(self) -> None:
        """Everything in this thread: whichever device can go on."""
        waiting = [self.actions(device)[::-1] for device in range(self.pipeline.count)]
        while any(waiting):
            for actions in waiting:
                while actions and self._ready(*actions[-1]):
                    self.compute(*actions.pop())

    def _ready(self, stage: int, action: Action) -> bool:
        if action.backward:
            return action.weights or stage == self.count - 1 or not self.backwards[stage].empty()
        return not self.forwards[stage].empty()

    def in_threads(self) -> None:
        """A thread for each device, the last one's being this."""
        state, last = ThreadState.capture(("cpu", "cuda")), self.pipeline.count - 1
        others = [
            threading.Thread(target=self._work, args=(device, state), name=f"equipoise-stage-{device}", daemon=True)
            for device in range(last)
        ]
        try:
            for thread in others:
                thread.start()
            self._work(last, state)
            for thread in others:
                thread.join()
        except BaseException:  # an interrupt while it waits, or no more threads to be had
            self._end()
            for thread in others:
                if thread.ident is not None:
                    thread.join()
            raise
        if self.errors:
            try:
                raise self.errors[0]
            finally:
                self.errors.clear()  # whose tracebacks hold this frame

    def _work(self, device: int, state: ThreadState) -> None:
        try:
            with state.entered():
                for stage, action in self.actions(device):
                    self.compute(stage, action)
        except _Ended:
            pass
        except BaseException as error:
            self.errors.append(error)
            self._end()

    def _end(self) -> None:
        """Lets nobody wait any longer."""
        for waiting in (*self.forwards, *self.backwards):
            waiting.put(None)

    # What is computed.

    def compute(self, stage: int, action: Action) -> None:
        """One action."""
        device, index = self.pipeline.devices[stage], action.micro_batch
        source = self.backwards if action.backward else self.forwards
        waits = not action.weights and not (action.backward and stage == self.count - 1)
        given: Any = source[stage].get() if waits else None
        if waits and given is None:
            raise _Ended
        begin = perf_counter()
        try:
            with on_device(device):
                if action.weights:
                    self.graphs[stage].weights(index)
                elif action.backward:
                    self._go_back(stage, index, given)
                else:
                    self._go_on(stage, index, given)
        except BaseException as error:
            if self.pipeline.failed is None:
                self.pipeline.failed = device
            error.add_note(f"This was stage {stage} of the pipeline, on {device}.")
            raise
        self.spans.append(Span(stage, action, begin, perf_counter()))

    def _go_on(self, stage: int, index: int, given: list[Any]) -> None:
        step, last = self.steps[index], stage == self.count - 1
        assert step.state is not None
        # The step's thread has the last device as its current one; this stage has its own.
        with step.state.entered(), on_device(self.pipeline.devices[stage]):
            program, keep = self.programs[index][stage], self.backward is not None
            made = self.graphs[stage].forward(index, program, given, keep=keep, last=last)
        if last:
            step.resume(made)
        else:
            self.forwards[stage + 1].put(made)

    def _go_back(self, stage: int, index: int, gradients: list[Tensor | None] | None) -> None:
        assert self.backward is not None
        found = self.graphs[stage].backward(index, partial(self.backward, index) if gradients is None else gradients)
        if stage:
            self.backwards[stage - 1].put(found)
        else:
            run_backward(self.inputs[index], found)  # what the user computed before the network


class _Ended(Exception):
    """Another stage has failed."""
