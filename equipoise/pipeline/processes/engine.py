"""Run a step over stages in several processes, seen from the main process, which has the last stage."""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import StepError
from equipoise.parallel.replicas.device_threads import ThreadState
from equipoise.pipeline.execution.stage_graphs import StageGraphs, go_back
from equipoise.pipeline.execution.suspended_step import SuspendedStep
from equipoise.pipeline.graph.stages import StageProgram, map_tensors
from equipoise.pipeline.processes.client import StageClient
from equipoise.pipeline.processes.commands import BACKWARD, FORWARD, HOME, StepOrder, way_to
from equipoise.pipeline.processes.messages import Arrivals, StageError
from equipoise.pipeline.schedule.schedule import Action, Schedule, actions_of, splits
from equipoise.pipeline.schedule.timeline import Span, Timeline

__all__ = ["ProcessPipeline"]


class ProcessPipeline:
    """Stages in processes; in its use like `parallel.pipeline.Pipeline`.

    Args:
        processes: The others.
        program: The number of the stages' calls.
        own: The stages of this process, the last stage being the last of them.
        schedule: See `parallel.schedule`.

    Attributes:
        failed: The device of the stage in which the last call failed; None if it has not.
        timeline: The last training step as it ran.
    """

    def __init__(self, processes: StageClient, program: int, own: Sequence[StageProgram], schedule: Schedule) -> None:
        self._processes, self._program, self._own, self._schedule = processes, program, own, schedule
        self._messenger, self._count = processes.messenger, len(processes.devices)
        self._each, self._last = len(own), self._count * len(own) - 1
        self._device, self._before = processes.devices[-1], processes.devices[-2]
        self.timeline = Timeline((), self._last + 1, self._each)
        self.fresh = True  # whether the next step begins a window

    @property
    def failed(self) -> torch.device | None:
        """The device of the stage in which the last call failed; None if it has not."""
        return self._processes.failed

    def forward(self, tensors: Sequence[Tensor]) -> Any:
        """One call of the network; no gradient can come back from it."""
        state = ThreadState.capture(("cpu", "cuda"))
        seed = self._processes.seed_of(training=False)
        order = StepOrder((self._program,), None, state.without_devices()._replace(grad=False), seed)
        self._begin(order, [tensors])
        made: Any = None
        for stage, program in zip(self._stages(), self._own, strict=True):
            made = self._messenger.receive(self._count - 1, way_to(stage, FORWARD))
            last = stage == self._last
            if not isinstance(made, StageError):
                try:
                    with torch.no_grad():
                        made = self._graphs().forward(0, program, made, keep=False, last=last)
                except BaseException as error:
                    if last:
                        self._processes.failed = self._device
                        raise
                    made = StageError.of(error, stage, self._device)
            if not last:
                self._messenger.hand_on(1, way_to(stage + 1, FORWARD), made, (stage, self._device))
        self._messenger.flush()
        if isinstance(made, StageError):
            raise self._processes.as_error(made)
        return map_tensors(_NoWayBack.give, made) if state.grad else made

    def _stages(self) -> range:
        """Those of this process."""
        return range(self._count - 1, self._last + 1, self._count)

    def _graphs(self, *, split: bool = False) -> StageGraphs:
        return StageGraphs(self._device, self._before, split=split)

    def _begin(self, order: StepOrder, inputs: Sequence[Sequence[Tensor]]) -> None:
        self._processes.failed = None
        self._processes.tell_what_learns()
        for stage in range(self._count - 1):
            seed = (order.seed + stage) % (1 << 48)
            self._processes.tell(stage, "step", *order._replace(seed=seed, stages_per_device=self._each))
        for tensors in inputs:
            self._messenger.send(1, way_to(0, FORWARD), [tuple(tensors)])

    def run(
        self,
        steps: Sequence[SuspendedStep],
        inputs: Sequence[Sequence[Tensor]],
        backward: Callable[[int], None],
        pipelines: Sequence["ProcessPipeline"] | None = None,
    ) -> None:
        """Computes micro-batches; see `Pipeline.run`.

        Raises:
            BaseException: What went wrong in a stage, in whatever process.
        """
        state = steps[0].state
        assert state is not None
        home = any(tensor.requires_grad for tensors in inputs for tensor in tensors)
        self._processes.steps += 1
        seed = self._processes.seed_of(training=True)
        pipelines = pipelines or [self] * len(steps)
        numbers = tuple(pipeline._program for pipeline in pipelines)
        order = StepOrder(numbers, self._schedule, state.without_devices(), seed, self.fresh, home)
        self._begin(order, inputs)
        error, spans = self._compute(steps, backward, [pipeline._own for pipeline in pipelines])
        if home:
            error = self._go_home(inputs, error)
        self._messenger.flush()
        try:
            told = self._processes.ask_all("spans")
        except BaseException as other:
            error = error or other
        if error is not None:
            try:
                raise error
            finally:
                del error  # whose traceback holds this frame
        spans += [span for each in told for span in each]
        self.timeline = Timeline(tuple(sorted(spans, key=lambda span: span.begin)), self._last + 1, self._each)

    def _compute(
        self,
        steps: Sequence[SuspendedStep],
        backward: Callable[[int], None],
        programs: Sequence[Sequence[StageProgram]],
    ) -> tuple[BaseException | None, list[Span]]:
        """This process's stages; after an error only the messages of the step are still exchanged."""
        split = splits(self._schedule)
        graphs, spans = {stage: self._graphs(split=split) for stage in self._stages()}, list[Span]()
        error: BaseException | None = None
        failure: StageError | None = None
        plan = (self._count - 1, self._count, len(steps), self._each)
        actions = actions_of(self._schedule, *plan)
        ways = {each: way for each in actions if (way := self._way(*each)) is not None}
        arrivals = Arrivals(self._messenger, ways.values())
        for stage, action in actions:
            index, last = action.micro_batch, stage == self._last
            way = ways.get((stage, action))
            given: Any = None if way is None else arrivals.receive(*way)
            if isinstance(given, StageError) and error is None:
                failure, error = given, self._processes.as_error(given)
            made: Any = None
            begin = perf_counter()
            try:
                if error is not None:
                    graphs[stage].forget(index)
                elif action.weights:
                    graphs[stage].weights(index)
                elif action.backward:
                    made = graphs[stage].backward(index, partial(backward, index) if last else given)
                else:
                    step, program = steps[index], programs[index][stage // self._count]
                    assert step.state is not None
                    with step.state.entered():
                        made = graphs[stage].forward(index, program, given, keep=True, last=last)
                    if last:
                        output, made = made, None
                        step.resume(output)
                        del output
            except BaseException as own:
                failure, error = StageError.of(own, stage, self._device), own
                self._processes.failed = self._device
            spans.append(Span(stage, action, begin, perf_counter()))
            unsent = self._hand_on(stage, action, made if failure is None else failure)
            if unsent is not None and error is None:
                failure, error = unsent, self._processes.as_error(unsent)
            del given, made
        return error, spans

    def _way(self, stage: int, action: Action) -> tuple[int, int] | None:
        """Where what an action needs comes from; nothing does for the backward of the last stage."""
        if not action.backward:
            return self._count - 1, way_to(stage, FORWARD)
        return None if action.weights or stage == self._last else (1, way_to(stage, BACKWARD))

    def _hand_on(self, stage: int, action: Action, made: Any) -> StageError | None:
        """Sends what an action made, unless it is the last stage's output; returns why it could not be sent."""
        where = (stage, self._device)
        if action.weights:
            return None
        if action.backward:
            return self._messenger.hand_on(self._count - 1, way_to(stage - 1, BACKWARD), made, where)
        if stage < self._last:
            return self._messenger.hand_on(1, way_to(stage + 1, FORWARD), made, where)
        return None

    def _go_home(self, inputs: Sequence[Sequence[Tensor]], error: BaseException | None) -> BaseException | None:
        """The backward of what the user computed before the network."""
        for tensors in inputs:
            gradients = self._messenger.receive(1, HOME)
            if isinstance(gradients, StageError):
                error = error or self._processes.as_error(gradients)
            elif error is None:
                try:
                    go_back(tensors, gradients)
                except BaseException as own:  # where the user's step has computed
                    error, self._processes.failed = own, self._device
        return error


class _NoWayBack(torch.autograd.Function):
    """Says why no gradient comes back, if somebody asks for one."""

    @classmethod
    def give(cls, tensor: Tensor) -> Tensor:
        """The same values; a backward through them is an error."""
        if not tensor.is_floating_point():
            return tensor
        made: Tensor = cls.apply(tensor, torch.empty(0, requires_grad=True))  # type: ignore[no-untyped-call]
        return made

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, token: Tensor) -> Tensor:
        """The same values."""
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Nobody keeps what it would need."""
        raise StepError(
            "Gradients of the network are computed in `training_step` alone under strategy='pipeline' with"
            " engine='processes'. Take engine='threads' to go backward through other calls of it."
        )
