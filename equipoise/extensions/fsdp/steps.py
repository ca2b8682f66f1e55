"""Steps of a sharded module: every process goes through the network, with a batch of its own or without.

A process without a batch, or whose `training_step` returned None, computes the network on a stand-in: an earlier batch
of the loader, its own or that of another process. Everything that this changes is restored, and its gradients are
exactly zero, also where the stand-in's values are not finite.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from equipoise.errors import StepError
from equipoise.extensions.fsdp.agreement import UnitCalls
from equipoise.extensions.fsdp.mesh.context.steps.sequence_steps import SequenceSteps
from equipoise.extensions.fsdp.mesh.layer_comparison import LayerComparison
from equipoise.extensions.fsdp.mesh.same_batches import check_same_batch
from equipoise.extensions.fsdp.misuse import explained
from equipoise.extensions.fsdp.sharded_module import ShardedModule
from equipoise.extensions.fsdp.within_steps.seen_parameters import hook_whole
from equipoise.interop.distributed.fully_sharded import unsharded_parameters
from equipoise.parallel.batches.sampling import NO_BATCH
from equipoise.parallel.communication.object_exchange import exchange_number
from equipoise.parallel.communication.processes import Processes
from equipoise.parallel.snapshot.preserve_state import preserve_state
from equipoise.parallel.step_protocols import NO_RESULT, EvaluationStep, StepResult, TrainingStep
from equipoise.strategies.distributed.loaders import refuse_missing_batch_by_hand
from equipoise.strategies.distributed.window_totals import Apart

__all__ = ["ShardedSteps"]

# What a process has at the beginning of a step.
_NOTHING = 0
_STAND_IN = 1
_BATCH = 2

# After so many steps of a pass, those that compute a batch together compare theirs again.
_COMPARED_EVERY = 100


class ShardedSteps:
    """Computes steps in all processes together.

    Args:
        sharded: The module in shards.
        processes: The processes.
        device: The device of this process.
        weight: The exchange of a window's total weight.
        compare_each: Whether every call of a unit is compared between the processes.
        sequences: Computes training steps, on whole sequences or on parts of them.
        comparison: Compares cut layers with whole ones before the first step. Default: None.
    """

    def __init__(
        self,
        sharded: ShardedModule,
        processes: Processes,
        device: torch.device,
        weight: Apart,
        *,
        compare_each: bool,
        sequences: SequenceSteps,
        comparison: LayerComparison | None = None,
    ) -> None:
        self._sharded = sharded
        self._module = sharded.module
        self._processes = processes
        self._device = device
        self._weight = weight
        self._calls = UnitCalls(sharded.units, compare_each=compare_each, together=processes.processes_per_batch)
        sharded.steps.note = self._calls.note
        self._sequences = sequences
        # The pass over a loader to which the stand-in belongs: each has a step object of its own.
        self._step: Any = None
        self._stand_in: Any = NO_BATCH
        self._all_have_stand_in = False
        self._has_compared = True
        self._steps_since = 0
        self._comparison = comparison

    def close(self) -> None:
        """Release the module and the last batch."""
        self._calls.close()
        self._sequences.close()
        if self._comparison is not None:
            self._comparison.close()
            self._comparison = None
        self._step = None
        self._stand_in = NO_BATCH

    # Training.

    def forward_backward(self, step: TrainingStep, parts: Sequence[Any], last: bool) -> StepResult:
        """Compute the gradients of a batch, or take part without one; see `Strategy.forward_backward`."""
        automatic = bool(getattr(self._module, "automatic_optimization", True))
        if not parts and not automatic:
            refuse_missing_batch_by_hand()
        self._begin_pass(step)
        self._steps_since += 1
        is_due = self._steps_since >= _COMPARED_EVERY and self._processes.processes_per_batch > 1
        if not self._has_compared or is_due:
            self._compare_batches(parts)
        if not self._all_have_stand_in:
            codes = self._say_what_is_here(parts)
            if max(codes) == _NOTHING:
                return self._end_without_batches(step)
            self._share_stand_in(codes, parts)
        if self._comparison is not None:
            self._compare_layers(self._comparison, step, parts[0] if parts else self._stand_in)
        if not automatic:
            return self._run_by_hand(step, parts[0])

        # 1. The forward, on the batch or a stand-in.
        result = NO_RESULT
        graph: Tensor | None = None
        with explained(self._sharded):
            with self._calls.watched():
                if parts:
                    result = self._sequences.compute(step, parts[0])
                    if result.loss is not None and self._stand_in is NO_BATCH:
                        self._stand_in = parts[0]
                # A step that was skipped before it came to the network takes part, too.
                if result.loss is None and self._calls.count == 0:
                    graph = self._graph_of_stand_in(step)
            graph = self._complete(step, result, graph)
            if parts:
                result = self._sequences.combine_over_row(step, result)

            # 2. The backward, with the exchange of gradients.
            if last:
                self._weight.send(step.total_with(result))
            self._sequences.backward(step, result)
            if graph is not None:
                self._backward_of_zeros(graph)
        return result

    def _compare_layers(self, comparison: LayerComparison, step: TrainingStep, batch: Any) -> None:
        """Compare cut layers with whole ones, unless `training_step` returns None for this batch."""
        if comparison.run(step, batch, self._gradients_of):
            self._comparison = None
        # Gathered anew, as without the comparison.
        self._sharded.free_gathered()

    def _gradients_of(self, step: TrainingStep, batch: Any) -> Tensor | None:
        """Add the gradients of a batch, and return its loss; None if some process has none."""
        with explained(self._sharded):
            with self._calls.watched():
                result, _ = step.capture_logs(partial(self._sequences.compute, step, batch, draws=False))
            has_graph = result.loss is not None and result.loss.requires_grad
            num_graphs = self._calls.end(has_graph=has_graph)
            if result.loss is None or num_graphs < self._processes.world_size:
                return None
            return self._sequences.backward_compared(result)

    def _end_without_batches(self, step: TrainingStep) -> StepResult:
        """End a window whose gradients come from a checkpoint, as no process has had a batch since."""
        self._weight.send(step.total_with(NO_RESULT))
        self._sequences.backward(step, NO_RESULT)
        return NO_RESULT

    def _run_by_hand(self, step: TrainingStep, batch: Any) -> StepResult:
        """Run a step of manual optimisation, in which the user runs backwards and steps optimisers."""
        self._sharded.free_gathered()
        weight = step.weight_of(batch)
        self._weight.send(weight)

        def relative_weight() -> float:
            return weight * self._processes.world_size / float(self._weight.total())

        self._sharded.steps.weigh(relative_weight)
        with explained(self._sharded), self._calls.watched():
            result = step(batch)
        self._calls.end(has_graph=True)
        return result

    def _complete(self, step: TrainingStep, result: StepResult, graph: Tensor | None) -> Tensor | None:
        """Agree on the end of the forward. Return the graph whose backward this process runs without a gradient."""
        # A batch without weight has a graph, and the step runs no backward of it.
        has_weight = isinstance(result.weight, Tensor) or result.weight != 0
        if result.loss is not None and not has_weight:
            graph = result.loss
        has_graph = result.loss is not None or graph is not None
        num_graphs = self._calls.end(has_graph=has_graph)
        if num_graphs == self._processes.world_size:
            return graph
        if num_graphs == 0:
            # No process runs a backward, after which torch would free the weights that it has gathered.
            self._sharded.free_gathered()
            return None
        # Where `training_step` returned None after the network, its graph is lost. All compute a stand-in then.
        self._share_stand_in(self._say_what_is_here(()), ())
        with self._calls.watched():
            another = self._graph_of_stand_in(step)
        self._calls.end(has_graph=True)
        if has_graph:
            return graph
        return another

    def _graph_of_stand_in(self, step: TrainingStep) -> Tensor:
        """Return the loss of the stand-in; nothing else remains of that computation."""
        result = NO_RESULT
        # The first batches of this process may all be without a loss.
        if self._stand_in is not NO_BATCH:
            result = self._apart(partial(self._sequences.compute, step, self._stand_in), step.capture_logs)
        if result.loss is None:
            raise StepError(
                "This process has nothing to learn from in this step, and `training_step` returns a loss for no earlier"
                " batch either. Under strategy='fsdp' each process runs the backward of the network, as all of them"
                " exchange its gradients. Return the loss multiplied by 0 instead of None."
            )
        loss: Tensor = result.loss
        return loss

    def _backward_of_zeros(self, loss: Tensor) -> None:
        """Run a backward that adds zeros to all gradients, so that the other processes can exchange theirs."""
        hooks = []
        for unit in self._sharded.units:
            for parameter in unsharded_parameters(unit.module):
                if parameter.requires_grad:
                    # A product of zero and infinity would not be zero.
                    hooks.append(hook_whole(parameter, torch.zeros_like))
        try:
            with self._sequences.backward_mode():
                loss.backward(torch.zeros_like(loss))  # type: ignore[no-untyped-call]
        finally:
            for hook in hooks:
                hook.remove()

    # Evaluation.

    def evaluate(self, step: EvaluationStep, parts: Sequence[Any]) -> Any:
        """Run an evaluation step; see `Strategy.evaluate`."""
        self._begin_pass(step)
        if not self._has_compared:
            self._compare_batches(parts)
        self._share_stand_in(self._say_what_is_here(parts), parts)
        self._stand_in = parts[0]
        with explained(self._sharded), self._calls.watched():
            output = step(parts[0])
        self._calls.end(has_graph=True)
        return output

    def await_others(self, step: EvaluationStep) -> None:
        """Compute stand-ins until no process has a batch; see `Strategy.await_others`."""
        self._begin_pass(step)
        if not self._has_compared:
            self._compare_batches(())
        while True:
            codes = self._say_what_is_here(())
            if _BATCH not in codes:
                self._begin_pass(None)
                # Hooks may change weights before the next step.
                self._sharded.free_gathered()
                return
            self._share_stand_in(codes, ())
            with self._calls.watched():
                self._apart(partial(step, self._stand_in), step.capture_logs)
            self._calls.end(has_graph=True)

    # Stand-ins.

    def _begin_pass(self, step: Any) -> None:
        """Forget the stand-in of another loader."""
        if step is not self._step:
            self._step = step
            self._stand_in = NO_BATCH
            self._all_have_stand_in = False
            self._has_compared = self._processes.processes_per_batch == 1

    def _compare_batches(self, parts: Sequence[Any]) -> None:
        """Check that those which compute a batch together have the same one."""
        self._has_compared = True
        self._steps_since = 0
        check_same_batch(parts[0] if parts else None, self._processes.processes_per_batch)

    def _say_what_is_here(self, parts: Sequence[Any]) -> list[int]:
        """Return what each process has at the beginning of this step."""
        if parts:
            return exchange_number(_BATCH)
        return exchange_number(_NOTHING if self._stand_in is NO_BATCH else _STAND_IN)

    def _share_stand_in(self, codes: Sequence[int], parts: Sequence[Any]) -> None:
        """Give every process a stand-in; what each process has is given by codes."""
        richest = max(codes)
        if richest == _NOTHING:
            raise StepError("No process has a batch in this step, so none can go through the network.")
        if _NOTHING in codes:
            here = parts[0] if parts else self._stand_in
            received = self._processes.broadcast(here, codes.index(richest))
            if not parts and self._stand_in is NO_BATCH:
                self._stand_in = move_data_to_device(received, self._device)
        self._all_have_stand_in = True

    def _apart(self, compute: Callable[[], Any], capture_logs: Any) -> Any:
        """Return what a computation returns, and restore all that it changes; what it logs is dropped."""
        with preserve_state(self._module, containers=True):
            result, _ = capture_logs(compute)
        return result
