"""Stages of a network whose forward runs as it is, micro-batch by micro-batch.

The forward of a micro-batch runs in the thread of its step, and pauses where it reaches a layer of the next stage. So
the stages of several micro-batches compute in the order of the schedule, as stages of recorded calls do. The backward
of a micro-batch runs as a whole in the turn of the last stage: nothing tells which values pass by the layers.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.extensions.common.timeline import Action
from equipoise.extensions.pipeline.execution.suspended_step import SuspendedStep
from equipoise.extensions.pipeline.execution.threaded_engine import Compute, Pipeline
from equipoise.extensions.pipeline.graph.call_structure import CallStructure
from equipoise.extensions.pipeline.schedule.schedule import Schedule
from equipoise.extensions.pipeline.stack.stacked_call import StackedCall, stages_noticed

__all__ = ["StackPipeline"]

# Passed on in the place of values, which stay in the step's thread.
_REACHED = object()


class StackPipeline(Pipeline):
    """Stages that begin at layers of a stack, in the threads of steps.

    Args:
        forward: The network's own forward.
        stages_of_layers: The stage of each layer of the stack.
        devices, schedule, stages_per_device, threads: See `Pipeline`.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        stages_of_layers: Mapping[nn.Module, int],
        devices: Sequence[torch.device],
        schedule: Schedule,
        *,
        stages_per_device: int = 1,
        threads: bool | None = None,
    ) -> None:
        super().__init__((), devices, schedule, stages_per_device=stages_per_device, threads=threads)
        self._network_forward = forward
        self._stages_of_layers = stages_of_layers

    def call(self, structure: CallStructure) -> Any:
        """Return the network's output for one call. Gradients flow through it, as through any forward.

        Args:
            structure: The call.
        """
        self.failed = None
        args, kwargs = structure.fill(structure.tensors)
        # Outside of steps no other micro-batch computes, so the call waits for no turn.
        call = StackedCall(self._network_forward, self.devices, _pass)
        try:
            with self._stages_noticed():
                return call.run(args, kwargs)
        except BaseException:
            self.failed = self.devices[call.stage]
            raise

    def run(
        self,
        steps: Sequence[SuspendedStep],
        inputs: Sequence[Sequence[Tensor]],
        backward: Callable[[int], None],
        pipelines: Sequence[Pipeline],
    ) -> None:
        """Compute micro-batches, each to the end of its step, and then backward; see `Pipeline.run`."""
        with self._stages_noticed():
            super().run(steps, inputs, backward, pipelines)

    def _stages_noticed(self) -> AbstractContextManager[None]:
        return stages_noticed(self._stages_of_layers, self.devices)

    def _computation(
        self,
        steps: Sequence[SuspendedStep],
        inputs: Sequence[Sequence[Tensor]],
        backward: Callable[[int], None],
        pipelines: Sequence[Pipeline],
    ) -> Compute:
        """Return how a stage computes: the step runs until it reaches a later stage, or to its end in the last one."""
        calls = [StackedCall(self._network_forward, self.devices, step.pause) for step in steps]
        last = len(self.devices) - 1

        def compute(stage: int, action: Action, received: Any) -> Any:
            index = action.micro_batch
            if not action.backward:
                _run_stage(steps[index], calls[index], stage, is_last=stage == last)
            elif stage == last and not action.weights:
                # This computes all gradients. Earlier stages only learn that it has ended, and begin the next one.
                backward(index)
            return _REACHED

        return compute


def _run_stage(step: SuspendedStep, call: StackedCall, stage: int, *, is_last: bool) -> None:
    # 1. The first stage begins the forward in the step's thread.
    if stage == 0:
        step.resume(call)
    # 2. The step pauses where it reaches a later stage. A forward may leave out all layers of a stage.
    while not step.ended and (is_last or call.stage <= stage):
        step.resume(None)


def _pass() -> None:
    """Continue immediately: outside of steps there is one call at a time."""
