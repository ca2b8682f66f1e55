"""One step in the stages of one process: receive, compute and send, action by action.

An error of a stage is sent on in the place of its values, forward and backward, until all messages of the step have
been exchanged. So no process waits for a value that will not come, and the next command finds all of them ready.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from equipoise.errors import StepError
from equipoise.extensions.common.timeline import Action, Span
from equipoise.extensions.pipeline.execution.stage_actions import Forward, run_action
from equipoise.extensions.pipeline.execution.stage_graphs import StageGraphs
from equipoise.extensions.pipeline.messaging.commands import BACKWARD, FORWARD, INPUT_GRADIENT, message_tag
from equipoise.extensions.pipeline.messaging.messages import Messenger, StageError, Way
from equipoise.extensions.pipeline.schedule.schedule import Schedule, Task, actions_of, receives

__all__ = ["ProcessStep", "tasks_of"]


def tasks_of(
    schedule: Schedule | None, device: int, devices: int, micro_batches: int, stages_per_device: int
) -> list[Task]:
    """Return the actions of a process, see `actions_of`; without a schedule the forwards alone."""
    actions = actions_of(schedule or "gpipe", device, devices, micro_batches, stages_per_device)
    if schedule is None:
        return [(stage, action) for stage, action in actions if not action.backward]
    return actions


class ProcessStep:
    """A step in the stages of one process.

    Args:
        messenger: Connection to the other processes.
        rank: Rank of this process.
        count: Number of processes.
        device: Device of this process.
        graphs: The graphs of each of its stages, by the numbers of the stages.
        last_stage: Number of the last stage of all.
        forward: Computes a stage.
        loss_backward: Runs the backward of a micro-batch's loss. Default: None, for a process without the last stage.
        on_error: Receives an error of a stage of this process, beside `failure`. Default: None.
        failure: An earlier failure, for which nothing is computed. Default: None.
        input_gradients: Whether the main process needs the gradients of the inputs. Default: False.

    Attributes:
        failure: The first failure of the step; None if there is none.
        spans: The actions as they ran.
    """

    def __init__(
        self,
        messenger: Messenger,
        rank: int,
        count: int,
        device: torch.device,
        graphs: dict[int, StageGraphs],
        last_stage: int,
        forward: Forward,
        *,
        loss_backward: Callable[[int], None] | None = None,
        on_error: Callable[[BaseException], None] | None = None,
        failure: StageError | None = None,
        input_gradients: bool = False,
    ) -> None:
        self._messenger = messenger
        # Stages run against the ranks: rank 0, the main process, computes the last one.
        self._rank_before = (rank + 1) % count
        self._rank_after = (rank - 1) % count
        self._device = device
        self._graphs = graphs
        self._last_stage = last_stage
        self._forward = forward
        self._loss_backward = loss_backward
        self._on_error = on_error
        self._input_gradients = input_gradients
        self.failure = failure
        self.spans: list[Span] = []

    def run(self, actions: Sequence[Task]) -> None:
        """Run the actions of this process in their order.

        Args:
            actions: For each action its stage and the action.
        """
        # The next value of each way arrives during computations.
        sources = [self._source_of(stage, action) for stage, action in actions]
        coming = Counter(source for source in sources if source is not None)
        for way in coming:
            self._messenger.expect(*way)
        for (stage, action), source in zip(actions, sources, strict=True):
            self._run_action(stage, action, source, coming)

    def _run_action(
        self,
        stage: int,
        action: Action,
        source: Way | None,
        coming: Counter[Way],
    ) -> None:
        # 1. Receive, and allocate memory for the next value.
        received: Any = None
        if source is not None:
            received = self._messenger.receive(*source)
            coming[source] -= 1
            if coming[source]:
                self._messenger.expect(*source)
            if isinstance(received, StageError):
                self.failure = self.failure or received

        # 2. Compute.
        result = self._attempt(stage, action, received)

        # 3. Send.
        target = self._target_of(stage, action)
        if target is not None:
            self._send(stage, target, result)

    def _send(self, stage: int, way: Way, result: Any) -> None:
        """Send the result of an action, or an error if it cannot be sent."""
        try:
            self._messenger.send(*way, result)
        except BaseException as error:
            if self._messenger.broken:
                raise
            reason = StepError(
                f"A stage returns a value that cannot be sent to another process: {error}. Let the network's blocks"
                " exchange tensors, tuples, lists and dictionaries of them, cut elsewhere, or take engine='threads'."
            )
            self._fail(stage, reason)
            self._messenger.send(*way, self.failure)

    def _fail(self, stage: int, error: BaseException) -> None:
        self.failure = StageError.of(error, stage, self._device)
        if self._on_error is not None:
            self._on_error(error)

    def _attempt(self, stage: int, action: Action, received: Any) -> Any:
        """Return the result of an action, or the failure of the step."""
        if self.failure is not None:
            self._graphs[stage].forget(action.micro_batch)
            return self.failure
        begin = perf_counter()
        try:
            loss_backward = self._loss_backward if stage == self._last_stage else None
            result = run_action(self._graphs[stage], stage, action, received, self._forward, loss_backward)
        except BaseException as error:
            self._fail(stage, error)
            return self.failure
        self.spans.append(Span(stage, action, begin, perf_counter()))
        return result

    def _source_of(self, stage: int, action: Action) -> Way | None:
        """Return the way by which the values of an action arrive; None if it needs none."""
        if not receives(stage, action, self._last_stage):
            return None
        if action.backward:
            return self._rank_after, message_tag(stage, BACKWARD)
        return self._rank_before, message_tag(stage, FORWARD)

    def _target_of(self, stage: int, action: Action) -> Way | None:
        """Return the way by which the result of an action leaves; None if it stays."""
        if action.weights:
            return None
        if action.backward and stage > 0:
            return self._rank_before, message_tag(stage - 1, BACKWARD)
        if action.backward:
            # The main process comes before the first stage.
            return (self._rank_before, INPUT_GRADIENT) if self._input_gradients else None
        if stage == self._last_stage:
            return None
        return self._rank_after, message_tag(stage + 1, FORWARD)
