"""Run a step over stages in several processes, seen from the main process, which has the last stage."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import StepError
from equipoise.extensions.common.timeline import Span, Timeline
from equipoise.extensions.pipeline.execution.stage_actions import Forward, forward_of_steps
from equipoise.extensions.pipeline.execution.stage_graphs import StageGraphs, run_backward
from equipoise.extensions.pipeline.execution.suspended_step import SuspendedStep
from equipoise.extensions.pipeline.graph.stages import StageProgram, map_tensors
from equipoise.extensions.pipeline.messaging.commands import FORWARD, INPUT_GRADIENT, StepOrder, message_tag, rank_of
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
        number: Number by which the workers know the stages' calls.
        stages_here: The stages of this process, ending with the last stage of all.
        schedule: Order of the computations; see `schedule.schedule`.

    Attributes:
        number: As above.
        timeline: The last training step as it ran.
        begins_window: Whether the next step begins an accumulation window. Default: True.
    """

    def __init__(
        self,
        processes: StageClient,
        number: int,
        stages_here: Sequence[StageProgram],
        schedule: Schedule,
    ) -> None:
        self._commands = processes.commands
        self._check_layers = processes.check_layers
        self._seeds = processes.seeds
        self._transfer = processes.transfer
        self._messenger = self._commands.messenger
        self.number = number
        self._stages_here = stages_here
        self._schedule = schedule
        self._num_processes = len(self._commands.devices)
        self._stages_per_device = len(stages_here)
        self._num_stages = self._num_processes * self._stages_per_device
        self._rank_of_first_stage = rank_of(0, self._num_processes)
        self._device = self._commands.devices[-1]
        self.timeline = Timeline((), self._num_stages, self._stages_per_device)
        self.begins_window = True

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
        self._begin(StepOrder((self.number,), None, state_of_workers, seed), [tensors])

        # 2. Compute this process's stages.
        graphs = self._new_graphs(split=False)
        outputs: list[Any] = []

        def compute(stage: int, micro_batch: int, inputs: Any) -> Any:
            is_last = stage == self._num_stages - 1
            with torch.no_grad():
                output = graphs[stage].forward(micro_batch, self.program(stage), inputs, keep=False, last=is_last)
            if is_last:
                outputs.append(output)
            return output

        errors: list[BaseException] = []
        self._compute(graphs, compute, None, 1, errors)
        self._messenger.flush()
        self._end(errors)

        # 3. Return the output.
        (output,) = outputs
        if state.grad:
            return map_tensors(_NoBackward.wrap, output)
        return output

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
        order = StepOrder(
            tuple(pipeline.number for pipeline in pipelines),
            self._schedule,
            state.without_devices(),
            self._seeds.training_seed(),
            begins_window=self.begins_window,
            input_gradients=input_gradients,
        )
        self._begin(order, inputs)

        # 2. Compute this process's stages.
        graphs = self._new_graphs(split=splits(self._schedule))

        def program_of(stage: int, micro_batch: int) -> StageProgram:
            return pipelines[micro_batch].program(stage)

        forward = forward_of_steps(graphs, steps, program_of, self._num_stages - 1)
        errors: list[BaseException] = []
        spans = self._compute(graphs, forward, self._schedule, len(steps), errors, backward)
        if input_gradients:
            self._backward_inputs(inputs, errors)
        self._messenger.flush()

        # 3. Learn how the workers fared.
        try:
            for spans_of_worker in self._commands.request_all("spans"):
                spans += spans_of_worker
        except BaseException as error:
            errors.append(error)
        self._end(errors)
        spans.sort(key=lambda span: span.begin)
        self.timeline = Timeline(tuple(spans), self._num_stages, self._stages_per_device)

    def program(self, stage: int) -> StageProgram:
        """Return a stage of this process, given its number among all stages."""
        return self._stages_here[stage // self._num_processes]

    def _new_graphs(self, *, split: bool) -> dict[int, StageGraphs]:
        """Return new graphs for each stage of this process."""
        device_before = self._commands.devices[-2]
        stages = range(self._commands.last, self._num_stages, self._num_processes)
        return {stage: StageGraphs(self._device, device_before, split=split) for stage in stages}

    def _begin(self, order: StepOrder, inputs: Sequence[Sequence[Tensor]]) -> None:
        """Send the workers an order, and the first of them the inputs of all micro-batches."""
        self._commands.failed = None
        self._check_layers()
        self._transfer.begin_step()
        for worker in range(self._commands.last):
            # Workers draw different numbers. A seed has 48 bits.
            seed = (order.seed + worker) % 2**48
            order_of_worker = order._replace(seed=seed, stages_per_device=self._stages_per_device)
            self._commands.send_command(worker, "step", *order_of_worker)
        for tensors in inputs:
            self._messenger.send(self._rank_of_first_stage, message_tag(0, FORWARD), [tuple(tensors)])

    def _compute(
        self,
        graphs: dict[int, StageGraphs],
        forward: Forward,
        schedule: Schedule | None,
        micro_batches: int,
        errors: list[BaseException],
        backward: Callable[[int], None] | None = None,
    ) -> list[Span]:
        """Compute the stages of this process, and return the actions as they ran. An error is added to `errors`."""
        step_here = ProcessStep(
            self._messenger,
            rank=0,
            count=self._num_processes,
            device=self._device,
            graphs=graphs,
            last_stage=self._num_stages - 1,
            forward=forward,
            loss_backward=backward,
            # The error itself is raised in this process.
            on_error=partial(self._note_error, errors),
        )
        step_here.run(
            tasks_of(schedule, self._commands.last, self._num_processes, micro_batches, self._stages_per_device)
        )
        if step_here.failure is not None and not errors:
            errors.append(self._commands.as_error(step_here.failure))
        return step_here.spans

    def _note_error(self, errors: list[BaseException], error: BaseException) -> None:
        """Note an error of a computation on this process's device."""
        errors.append(error)
        self._commands.note_failure(self._device)

    def _backward_inputs(self, inputs: Sequence[Sequence[Tensor]], errors: list[BaseException]) -> None:
        """Run the backward of what the step computed before the network.

        Args:
            inputs: The inputs of each micro-batch.
            errors: Errors of the step so far, to which one of this backward is added. After an error gradients are
                received, but not used.
        """
        for tensors in inputs:
            gradients = self._messenger.receive(self._rank_of_first_stage, INPUT_GRADIENT)
            if errors:
                continue
            if isinstance(gradients, StageError):
                errors.append(self._commands.as_error(gradients))
                continue
            try:
                run_backward(tensors, gradients)
            except BaseException as error:
                self._note_error(errors, error)

    def _end(self, errors: list[BaseException]) -> None:
        """End a step, and raise its first error, if there is one."""
        self._transfer.end_step()
        if errors:
            try:
                raise errors[0]
            finally:
                # Their tracebacks refer to the frames that have the list.
                errors.clear()


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
