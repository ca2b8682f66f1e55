"""Actions of stages that consist of recorded calls, whether threads or processes compute them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from equipoise.extensions.common.timeline import Action
from equipoise.extensions.pipeline.execution.stage_graphs import StageGraphs
from equipoise.extensions.pipeline.execution.suspended_step import SuspendedStep
from equipoise.extensions.pipeline.graph.stages import StageProgram
from equipoise.parallel.device_work import on_device

__all__ = ["Forward", "forward_of_steps", "run_action"]

# Returns the outputs of a stage for a micro-batch, from its inputs.
Forward = Callable[[int, int, Any], Any]


def forward_of_steps(
    graphs: Mapping[int, StageGraphs],
    steps: Sequence[SuspendedStep],
    program_of: Callable[[int, int], StageProgram],
    last_stage: int,
) -> Forward:
    """Return the forward of stages; after the last one the user's step continues to its loss.

    Args:
        graphs: The graphs of each stage.
        steps: For each micro-batch its step, which waits for the network's output.
        program_of: Returns the calls of a stage for a micro-batch.
        last_stage: Number of the last stage of all.
    """

    def forward(stage: int, micro_batch: int, inputs: Any) -> Any:
        step = steps[micro_batch]
        program = program_of(stage, micro_batch)
        is_last = stage == last_stage
        assert step.state is not None
        # The step's thread has the last device as its current one, this stage has its own.
        with step.state.entered(), on_device(graphs[stage].device):
            outputs = graphs[stage].forward(micro_batch, program, inputs, keep=True, last=is_last)
        if is_last:
            step.resume(outputs)
            return None
        return outputs

    return forward


def run_action(
    graphs: StageGraphs,
    stage: int,
    action: Action,
    received: Any,
    forward: Forward,
    loss_backward: Callable[[int], None] | None,
) -> Any:
    """Run an action of a stage, and return what it passes on: outputs, or gradients of its inputs.

    Args:
        graphs: The graphs of the stage.
        stage: The stage.
        action: The action.
        received: The values from the stage before or after; None if the action needs none.
        forward: Computes a stage.
        loss_backward: For the last stage the backward of a micro-batch's loss; None for others.
    """
    if action.weights:
        graphs.weights(action.micro_batch)
        return None
    if not action.backward:
        return forward(stage, action.micro_batch, received)
    gradients = received
    if loss_backward is not None:
        gradients = partial(loss_backward, action.micro_batch)
    return graphs.backward(action.micro_batch, gradients)
