"""One batch of training, computed in micro-batches that pass the stages of the network."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn

from equipoise.errors import StepError
from equipoise.extensions.common.timeline import Timeline
from equipoise.extensions.pipeline.execution.suspended_step import SuspendedStep
from equipoise.extensions.pipeline.execution.user_backwards import backwards_through_network_refused
from equipoise.extensions.pipeline.graph.call_structure import CallStructure
from equipoise.extensions.pipeline.network import StagedNetwork
from equipoise.extensions.pipeline.processes.main_process.client import StageClient
from equipoise.extensions.pipeline.strategy.watched_parameters import WatchedParameters
from equipoise.parallel.step_protocols import StepResult, TrainingStep

__all__ = ["PipelinedBatch"]


class PipelinedBatch:
    """Runs the training step on every micro-batch of a batch.

        start      every step runs in a thread of its own, and stops where it calls the network
        stages     compute the calls in the order of the schedule; a step whose output is there continues to its loss
        backward   runs for each micro-batch when the schedule has its turn

    Args:
        step: The user's training step.
        module: The user's module.
        micro_batches: The micro-batches.
        sizes: The number of samples of each.

    Attributes:
        retains_graph: True if the graph of the present backward is used once more: the network's inputs have a graph,
            through which the first stage runs backward.
        timeline: The step as it ran; None if no micro-batch called the network.
        follow: Calls `on_after_backward`, from `compute` on.
    """

    follow: Callable[[], None]

    def __init__(
        self,
        step: TrainingStep,
        module: nn.Module,
        micro_batches: Sequence[Any],
        sizes: Sequence[int],
    ) -> None:
        self.retains_graph = False
        self.timeline: Timeline | None = None
        self._step = step
        self._module = module
        self._sizes = sizes
        self._steps: list[SuspendedStep] = []
        for micro_batch, size in zip(micro_batches, sizes, strict=True):
            self._steps.append(SuspendedStep(partial(step.run_on, module, micro_batch, size)))
        # By the number of the micro-batch: the calls of the network, and the results after the backward.
        self._calls: dict[int, CallStructure] = {}
        self._results: dict[int, StepResult] = {}

    def compute(self, network: StagedNetwork, processes: StageClient | None) -> list[StepResult]:
        """Compute the gradients of all micro-batches, and return their results without graphs.

        Args:
            network: The network.
            processes: The processes of other stages; None if all are in this process.

        Raises:
            StepError: If the step does not call the network, differentiates it, or changes parameters or gradients.
        """
        # A step that runs once may change them. In the first batch of a run all values are compared: torch does not
        # count changes by `data`, and layers outside the network move to their device.
        named = dict(self._module.named_parameters()) if len(self._steps) > 1 else {}
        watched = WatchedParameters(named, contents=network.cut is None)
        try:
            with backwards_through_network_refused(), self._step.hook_scope(), self._step.follow_later() as self.follow:
                self._start()
                # Only the backward changes gradients from here on.
                watched.check_gradients()
                watched.check_values()
                self._run(network, processes)
                if processes is None:
                    watched.check_values()
        except BaseException:
            # Threads of steps that wait for their output would never end.
            for step in self._steps:
                step.abandon()
            raise
        # The results stand in the order of the schedule, which need not be that of the micro-batches.
        return [self._results[number] for number in range(len(self._steps))]

    def _start(self) -> None:
        """Run every step to its call of the network, or to its end if it skips its micro-batch."""
        for number, step in enumerate(self._steps):
            step.start()
            if not step.ended:
                args, kwargs = step.call or ((), {})
                self._calls[number] = CallStructure(args, kwargs)
            # A step may skip its micro-batch, but has nothing to compute a loss from without the network.
            elif step.result.loss is not None:
                raise StepError(
                    "`training_step` did not call the network, which is what a pipeline computes: the module itself, as"
                    " in self(x), or its largest child. Call it once for every batch, or choose another strategy."
                )

    def _run(self, network: StagedNetwork, processes: StageClient | None) -> None:
        """Compute the calls of the network, and run the backward of every micro-batch once."""
        begins_window = self._step.begins_window
        # The network counts only the micro-batches that call it.
        numbers = list(self._calls)
        if numbers:
            steps = [self._steps[number] for number in numbers]
            calls = list(self._calls.values())

            def backward(position: int) -> None:
                self._backward(numbers[position])

            self.timeline = network.run_steps(steps, calls, backward, begins_window=begins_window)
        elif begins_window and processes is not None:
            # Other processes take no part in this step, but hold gradients of an earlier window.
            processes.commands.send_to_all("begin_window")
        # Hooks of the backward run for skipped micro-batches, too.
        for number in range(len(self._steps)):
            if number not in self._calls:
                self._backward(number)

    def _backward(self, number: int) -> None:
        """Run the backward of a micro-batch, down to the inputs of the last stage."""
        # 1. The loss of a micro-batch counts by its share of the samples.
        self._step.begin_micro_batch(self._sizes[number], sum(self._sizes))
        # 2. The first stage needs the graph again if it runs backward to the network's inputs.
        inputs: Sequence[Tensor] = ()
        if number in self._calls:
            inputs = self._calls[number].tensors
        self.retains_graph = any(tensor.grad_fn is not None for tensor in inputs)
        # 3. The graph is freed with this reference to it.
        result = self._steps[number].take_result()
        self._step.backward(result)
        self._results[number] = _detached(result)


def _detached(result: StepResult) -> StepResult:
    """Return a result without its graph, whose end holds the last stage's inputs and their gradients."""
    loss = result.loss
    if loss is not None:
        loss = loss.detach()
    return result._replace(loss=loss, outputs=apply_to_collection(result.outputs, Tensor, Tensor.detach))
