"""Run a step over stages in several processes, seen from the main process, which has the last stage."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import StepError
from equipoise.extensions.common.timeline import Span, Timeline
from equipoise.extensions.pipeline.execution.stage_actions import Forward, forward_of_steps
from equipoise.extensions.pipeline.execution.stage_graphs import StageGraphs, run_backward
from equipoise.extensions.pipeline.execution.suspended_step import SuspendedStep
from equipoise.extensions.pipeline.graph.stages import StageProgram, map_tensors
from equipoise.extensions.pipeline.messaging.commands import FORWARD, INPUT_GRADIENT, StepOrder, message_tag
from equipoise.extensions.pipeline.messaging.messages import StageError
from equipoise.extensions.pipeline.messaging.process_step import ProcessStep, tasks_of
from equipoise.extensions.pipeline.processes.main_process.client import StageClient
from equipoise.extensions.pipeline.schedule.schedule import Schedule, splits
from equipoise.parallel.replicas.device_threads import ThreadState

__all__ = ["ProcessPipeline"]


class ProcessPipeline:
    """Stages in processes. It is used like `execution.threaded_engine.Pipeline`.

    Args:
        processes: The workers.
        program: Number by which the workers know the stages' calls.
        programs: The stages of this process, ending with the last stage of all.
        schedule: Order of the computations; see `schedule.schedule`.

    Attributes:
        timeline: The last training step as it ran.
        fresh: Whether the next step begins an accumulation window. Default: True.
    """

    def __init__(
        self,
        processes: StageClient,
        program: int,
        programs: Sequence[StageProgram],
        schedule: Schedule,
    ) -> None:
        self._commands = processes.commands
        self._check_layers = processes.check_layers
        self._seeds = processes.seeds
        self._transfer = processes.transfer
        self._program = program
        self._programs = programs
        self._schedule: Schedule = schedule
        self._messenger = self._commands.messenger
        # Numbers of processes, of stages in each, and of the last stage.
        self._count = len(self._commands.devices)
        self._stages_per_device = len(programs)
        self._last = self._count * self._stages_per_device - 1
        # Rank of the worker with the first stage.
        self._first_worker = self._count - 1
        self._device = self._commands.devices[-1]
        self._device_before = self._commands.devices[-2]
        self.timeline = Timeline((), self._last + 1, self._stages_per_device)
        self.fresh = True

    @property
    def failed(self) -> torch.device | None:
        """Device of the stage in which the last call failed; None if it has not."""
        return self._commands.failed

    def forward(self, tensors: Sequence[Tensor]) -> Any:
        """Return the network's output for one call. A backward through it is an error.

        Args:
            tensors: The tensors of the call.
        """
        # 1. Order a forward of the workers.
        state = ThreadState.capture(("cpu", "cuda"))
        state_of_workers = state.without_devices()._replace(grad=False)
        seed = self._seeds.next_evaluation_seed()
        self._begin(StepOrder((self._program,), None, state_of_workers, seed), [tensors])

        # 2. Compute this process's stages.
        graphs = self._graphs(split=False)
        outputs: list[Any] = []

        def compute(stage: int, micro_batch: int, inputs: Any) -> Any:
            program = self._programs[stage // self._count]
            is_last = stage == self._last
            with torch.no_grad():
                output = graphs[stage].forward(micro_batch, program, inputs, keep=False, last=is_last)
            if is_last:
                outputs.append(output)
            return output

        error, _ = self._compute(graphs, compute, None, 1)
        self._messenger.flush()
        self._transfer.end_step()

        # 3. Return the output, or raise the error that came in its place.
        if error is not None:
            try:
                raise error
            finally:
                # Its traceback refers to this frame.
                del error
        (output,) = outputs
        if state.grad:
            return map_tensors(_NoBackward.wrap, output)
        return output

    def _graphs(self, *, split: bool) -> dict[int, StageGraphs]:
        """Return new graphs for each stage of this process."""
        stages = range(self._count - 1, self._last + 1, self._count)
        return {stage: StageGraphs(self._device, self._device_before, split=split) for stage in stages}

    def _begin(self, order: StepOrder, inputs: Sequence[Sequence[Tensor]]) -> None:
        """Send the workers an order, and the first of them the inputs of all micro-batches."""
        self._commands.failed = None
        self._check_layers()
        self._transfer.begin_step()
        for stage in range(self._count - 1):
            # Stages draw different numbers.
            seed = (order.seed + stage) % (1 << 48)
            order_of_worker = order._replace(seed=seed, stages_per_device=self._stages_per_device)
            self._commands.send_command(stage, "step", *order_of_worker)
        for tensors in inputs:
            self._messenger.send(self._first_worker, message_tag(0, FORWARD), [tuple(tensors)])

    def run(
        self,
        steps: Sequence[SuspendedStep],
        inputs: Sequence[Sequence[Tensor]],
        backward: Callable[[int], None],
        pipelines: Sequence["ProcessPipeline"],
    ) -> None:
        """Compute micro-batches; see `Pipeline.run`.

        Raises:
            BaseException: Error of a stage in any process.
        """
        # 1. Order the step.
        state = steps[0].state
        assert state is not None
        input_gradients = any(tensor.requires_grad for tensors in inputs for tensor in tensors)
        seed = self._seeds.training_seed()
        numbers = tuple(pipeline._program for pipeline in pipelines)
        order = StepOrder(numbers, self._schedule, state.without_devices(), seed, self.fresh, input_gradients)
        self._begin(order, inputs)

        # 2. Compute this process's stages.
        graphs = self._graphs(split=splits(self._schedule))

        def program_of(stage: int, micro_batch: int) -> StageProgram:
            return pipelines[micro_batch]._programs[stage // self._count]

        forward = forward_of_steps(graphs, steps, program_of, self._last)
        error, spans = self._compute(graphs, forward, self._schedule, len(steps), backward)
        if input_gradients:
            error = self._backward_inputs(inputs, error)
        self._messenger.flush()

        # 3. Learn how the workers fared.
        try:
            spans_of_workers = self._commands.request_all("spans")
        except BaseException as failure:
            error = error or failure
        self._transfer.end_step()
        if error is not None:
            try:
                raise error
            finally:
                # Its traceback refers to this frame.
                del error
        for spans_of_worker in spans_of_workers:
            spans += spans_of_worker
        ordered = sorted(spans, key=lambda span: span.begin)
        self.timeline = Timeline(tuple(ordered), self._last + 1, self._stages_per_device)

    def _compute(
        self,
        graphs: dict[int, StageGraphs],
        forward: Forward,
        schedule: Schedule | None,
        micro_batches: int,
        backward: Callable[[int], None] | None = None,
    ) -> tuple[BaseException | None, list[Span]]:
        """Compute the stages of this process, and return the error, if any, and the actions as they ran."""
        errors: list[BaseException] = []

        def note_error(error: BaseException) -> None:
            # The error itself is raised in this process.
            errors.append(error)
            self._commands.note_failure(self._device)

        step_here = ProcessStep(
            self._messenger,
            0,
            self._count,
            self._device,
            graphs,
            self._last,
            forward,
            loss_backward=backward,
            on_error=note_error,
        )
        step_here.run(tasks_of(schedule, self._count - 1, self._count, micro_batches, self._stages_per_device))
        # An error's traceback refers to these objects, so none of them keeps it.
        if errors:
            return errors.pop(), step_here.spans
        if step_here.failure is not None:
            return self._commands.as_error(step_here.failure), step_here.spans
        return None, step_here.spans

    def _backward_inputs(self, inputs: Sequence[Sequence[Tensor]], error: BaseException | None) -> BaseException | None:
        """Run the backward of what the step computed before the network.

        Args:
            inputs: The inputs of each micro-batch.
            error: Earlier error of the step; gradients are then received, but not used.

        Returns:
            The first error; None if there is none.
        """
        for tensors in inputs:
            gradients = self._messenger.receive(self._first_worker, INPUT_GRADIENT)
            if isinstance(gradients, StageError):
                error = error or self._commands.as_error(gradients)
            elif error is None:
                try:
                    run_backward(tensors, gradients)
                except BaseException as failure:
                    # These computations ran on this process's device.
                    error = failure
                    self._commands.note_failure(self._device)
        return error


class _NoBackward(torch.autograd.Function):
    """Identity whose backward raises an error that says why there are no gradients."""

    @classmethod
    def wrap(cls, tensor: Tensor) -> Tensor:
        """Return the same values; a backward through them is an error."""
        if not tensor.is_floating_point():
            return tensor
        token = torch.empty(0, requires_grad=True)
        wrapped: Tensor = cls.apply(tensor, token)  # type: ignore[no-untyped-call]
        return wrapped

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, token: Tensor) -> Tensor:
        """Return the same values."""
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Raise an error: the workers keep no graph of such a call."""
        raise StepError(
            "Gradients of the network are computed in `training_step` alone under strategy='pipeline' with"
            " engine='processes'. Take engine='threads' to go backward through other calls of it."
        )
