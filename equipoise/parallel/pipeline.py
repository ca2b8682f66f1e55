"""Computes the micro-batches of a step in a pipeline of stages within one process.

Between stages values are detached, so every stage has a graph of its own for each micro-batch, and hands its inputs'
gradients back to the stage before. Where all stages lie on different devices each has a thread, and devices compute at
the same time. Where some share a device one thread does everything in a fixed order: that would not be quicker
otherwise, and random numbers are drawn in the same order every time.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from equipoise.parallel.device_threads import ThreadState
from equipoise.parallel.micro_steps import MicroStep, inside_stage
from equipoise.parallel.schedule import Action, Schedule, Span, Timeline, actions_of
from equipoise.parallel.stages import StageProgram, check_exchanged, map_tensors, map_values

__all__ = ["Pipeline"]


class Pipeline:
    """Stages on devices.

    Args:
        stages: The stages, for calls of one structure.
        devices: The device of each.
        schedule: See `parallel.schedule`.
        threads: Whether each stage has a thread. Default: if no two lie on the same device.

    Attributes:
        failed: The device of the stage in which the last `run` failed; None if none has.
        timeline: The last step as it ran, in the time of this process; what devices do later is not in it.
    """

    def __init__(
        self,
        stages: Sequence[StageProgram],
        devices: Sequence[torch.device],
        schedule: Schedule,
        *,
        threads: bool | None = None,
    ) -> None:
        self.stages, self.devices, self.schedule = list(stages), list(devices), schedule
        self.threads = len(set(devices)) == len(devices) > 1 if threads is None else threads
        self.timeline = Timeline((), len(stages))
        self.failed: torch.device | None = None

    def forward(self, tensors: Sequence[Tensor]) -> Any:
        """One call of the network, stage after stage; gradients pass through it as through any forward."""
        values: Any = [tuple(tensors)]
        before = self.devices[0]
        for stage, device in zip(self.stages, self.devices, strict=True):
            with _on(device), inside_stage():
                values = stage.run(*_brought(values, before, device, _to))
            before = device
        return values

    def run(
        self,
        steps: Sequence[MicroStep],
        inputs: Sequence[Sequence[Tensor]],
        backward: Callable[[int], None] | None,
        programs: Sequence[Sequence[StageProgram]] | None = None,
    ) -> None:
        """Computes micro-batches, each to the end of its step and then backward.

        Args:
            steps: The steps, each waiting for the network's output.
            inputs: The tensors of its call of the network.
            backward: Runs the backward of a step that has ended, down to the inputs of the last stage. None: there is
                no backward.
            programs: For each micro-batch its stages, where calls are of several structures. Default: `stages`.
        """
        self.failed = None
        run = _Run(self, steps, inputs, backward, programs or [self.stages] * len(steps))
        try:
            if self.threads:
                run.in_threads()
            else:
                run.in_turn()
        except BaseException:
            for step in steps:
                step.abandon()
            raise
        self.timeline = Timeline(tuple(sorted(run.spans, key=lambda span: span.begin)), len(self.stages))


class _Run:
    """One step of the trainer."""

    def __init__(
        self,
        pipeline: Pipeline,
        steps: Sequence[MicroStep],
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
        self.held: list[dict[int, tuple[list[Any], list[Any]]]] = [{} for _ in range(self.count)]
        self.spans: list[Span] = []
        self.errors: list[BaseException] = []
        for tensors in inputs:
            self.forwards[0].put([tuple(tensors)])

    def actions(self, stage: int) -> list[Action]:
        actions = actions_of(self.pipeline.schedule, stage, self.count, len(self.steps))
        return actions if self.backward is not None else [action for action in actions if not action.backward]

    # Who computes.

    def in_turn(self) -> None:
        """Everything in this thread: whichever stage can go on."""
        waiting = [self.actions(stage)[::-1] for stage in range(self.count)]
        while any(waiting):
            for stage in range(self.count):
                while waiting[stage] and self._ready(stage, waiting[stage][-1]):
                    self.compute(stage, waiting[stage].pop())

    def _ready(self, stage: int, action: Action) -> bool:
        if action.backward:
            return stage == self.count - 1 or not self.backwards[stage].empty()
        return not self.forwards[stage].empty()

    def in_threads(self) -> None:
        """A thread for each stage, the last one's being this."""
        state = ThreadState.capture(("cpu", "cuda"))
        others = [
            threading.Thread(target=self._work, args=(stage, state), name=f"equipoise-stage-{stage}", daemon=True)
            for stage in range(self.count - 1)
        ]
        try:
            for thread in others:
                thread.start()
            self._work(self.count - 1, state)
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

    def _work(self, stage: int, state: ThreadState) -> None:
        try:
            with state.entered():
                for action in self.actions(stage):
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
        begins_backward = action.backward and stage == self.count - 1
        given: Any = None if begins_backward else source[stage].get()
        if given is None and not begins_backward:
            raise _Ended
        begin = perf_counter()
        try:
            with _on(device):
                if action.backward:
                    self._go_back(stage, index, given)
                else:
                    self._go_on(stage, index, given, device)
        except BaseException as error:
            if self.pipeline.failed is None:
                self.pipeline.failed = device
            error.add_note(f"This was stage {stage} of the pipeline, on {device}.")
            raise
        self.spans.append(Span(stage, action, begin, perf_counter()))

    def _go_on(self, stage: int, index: int, given: list[Any], device: torch.device) -> None:
        step = self.steps[index]
        assert step.state is not None
        with step.state.entered():
            differentiable = torch.is_grad_enabled() and self.backward is not None
            before = self.pipeline.devices[max(0, stage - 1)]
            taken = _brought(given, before, device, _leaf if differentiable else _without_history)
            program = self.programs[index][stage]
            with inside_stage():
                made = program.run(*taken)
        if stage < self.count - 1:
            check_exchanged(made, program.outputs)
        if self.backward is not None:
            kept = [] if stage == self.count - 1 else _tensors(made)
            self.held[stage][index] = (_tensors(taken), kept)
        if stage == self.count - 1:
            step.resume(made)
        else:
            self.forwards[stage + 1].put(made)

    def _go_back(self, stage: int, index: int, gradients: list[Tensor | None] | None) -> None:
        taken, made = self.held[stage].pop(index)
        if gradients is None:
            assert self.backward is not None
            self.backward(index)
        else:
            pairs = [
                (tensor, _to(gradient, tensor.device))
                for tensor, gradient in zip(made, gradients, strict=True)
                if gradient is not None and tensor.requires_grad
            ]
            if pairs:
                torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        found = [tensor.grad for tensor in taken]
        for tensor in taken:
            tensor.grad = None  # whoever keeps a graph keeps its leaves
        if stage:
            self.backwards[stage - 1].put(found)
            return
        before = [
            (tensor, gradient.to(tensor.device))
            for tensor, gradient in zip(self.inputs[index], found, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        if before:  # what the user computed before the network
            torch.autograd.backward([tensor for tensor, _ in before], [gradient for _, gradient in before])


class _Ended(Exception):
    """Another stage has failed."""


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        yield


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    # A copy to the CPU that nobody waits for would be read before it is there.
    return tensor if tensor.device == device else tensor.to(device, non_blocking=device.type == "cuda")


def _without_history(tensor: Tensor, device: torch.device) -> Tensor:
    return _to(tensor.detach(), device)


def _leaf(tensor: Tensor, device: torch.device) -> Tensor:
    """The same values without their history, on a device, where gradients end."""
    made = _to(tensor.detach(), device)
    return made.requires_grad_() if tensor.requires_grad else made


def _brought(values: Any, before: torch.device, device: torch.device, bring: Callable[..., Tensor]) -> Any:
    """Values of a stage for the next: its tensors brought to the device, and what names the device before renamed."""

    def take(value: Any) -> Any:
        if isinstance(value, Tensor):
            return bring(value, device)
        return device if isinstance(value, torch.device) and value == before else value

    return map_values(take, values)


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(found.append, value)
    return found
