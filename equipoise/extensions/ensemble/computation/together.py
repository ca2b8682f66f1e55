"""The members' training steps together, as long as that gives the numbers of members one by one.

The first step is computed one by one, then again for all members together, and compared: losses, logged values,
buffers and gradients. A difference, or whatever a batched step cannot do, ends the batched steps.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from equipoise.extensions.ensemble.computation.batched_step import BatchedStep, NotBatchable, StackedBatches
from equipoise.extensions.ensemble.members.stacked_members import StackedMembers
from equipoise.interop.torch.modules import versions
from equipoise.parallel.equality import Tolerance, gap_of, tolerance_of
from equipoise.parallel.snapshot import random_state
from equipoise.parallel.snapshot.plain.paths import Root
from equipoise.parallel.snapshot.plain.places import text_of
from equipoise.parallel.snapshot.plain.state import PlainState
from equipoise.parallel.step_protocols import StepResult, TrainingStep

__all__ = ["Together"]

# The words of torch's message where a step draws random numbers.
_DRAWS = "randomness error mode"


class Together:
    """Computes the training steps of all members together where that is possible.

    Args:
        members: The members.
        allows_randomness: Whether steps that draw random numbers may be computed together.
        autocast: Type of device and dtype of the mixed precision of the forward; None if there is none.

    Attributes:
        reason: The reason why steps are computed one by one; empty while they are not.
        has_batched: True if the last step was computed for all members together.
    """

    def __init__(
        self, members: StackedMembers, *, allows_randomness: bool, autocast: tuple[str, torch.dtype] | None
    ) -> None:
        self._members = members
        self._batched = BatchedStep(members)
        self._allows_randomness = allows_randomness
        self._randomness = "error"
        dtypes = {parameter.stacked.dtype for parameter in members.parameters}
        self._tolerance = tolerance_of(dtypes if autocast is None else {*dtypes, autocast[1]})
        self._is_compared = False
        self.has_batched = False
        self.reason = ""
        self._end(self._batched.reason_against())

    def run(
        self,
        step: TrainingStep,
        batches: Sequence[Any],
        size: int,
        one_by_one: Callable[[], list[StepResult]],
    ) -> list[StepResult]:
        """Compute the step of all members.

        Args:
            step: The step.
            batches: The batch of each member.
            size: The number of samples of each batch.
            one_by_one: Function that computes the step of each member.
        """
        self.has_batched = False
        if self.reason:
            return one_by_one()
        try:
            stacked = StackedBatches.of(batches)
        except NotBatchable:
            # Those of other steps may be alike.
            return one_by_one()
        if not self._is_compared:
            return self._compared(step, stacked, size, one_by_one)
        try:
            results = self._batched(step, stacked, size, self._randomness)
        except NotBatchable as error:
            self._end(str(error))
            return one_by_one()
        self.has_batched = True
        return results

    def _compared(
        self, step: TrainingStep, batches: StackedBatches, size: int, one_by_one: Callable[[], list[StepResult]]
    ) -> list[StepResult]:
        """Return the results of a step computed one by one, after a comparison with those of the batched step."""
        # 1. One by one. A step that leaves something behind would do so for all members at once.
        buffers_before = self._copied_buffers()
        versions_before = self._versions()
        state = PlainState()
        state.mark(self._roots(), with_starts=False)
        results = one_by_one()
        if any(result.loss is None for result in results):
            return results
        changes = [text_of(path) for entries in state.changes(self._roots()).values() for path, *_ in entries]
        if changes:
            self._end(f"it changes {changes[0]}")
        elif self._versions() != versions_before:
            self._end("it changes parameters")
        if self.reason:
            return results

        # 2. Together, from the same state.
        buffers = self._copied_buffers()
        self._batched.restore_buffers(buffers_before)
        try:
            with random_state.isolated():
                computed = self._batched(step, batches, size, self._randomness)
            self._end(self._difference(results, buffers, computed))
        except NotBatchable as error:
            # What is drawn at random has nothing to be compared with.
            if _DRAWS in str(error) and self._allows_randomness:
                self._randomness = "different"
            else:
                self._end(str(error))
        self._batched.restore_buffers(buffers)
        self._is_compared = True
        return results

    def _difference(self, results: list[StepResult], buffers: list[Tensor], computed: list[StepResult]) -> str:
        """Return what differs in a batched step from members one by one; empty if nothing does."""
        tolerance = self._tolerance
        if any(gap_of(*pair, tolerance) for pair in zip(buffers, self._batched.buffers, strict=True)):
            return "its buffers differ from those of members one by one"
        for result, batched in zip(results, computed, strict=True):
            expected = [result.loss, result.weight, *(logged.value for logged in result.logged)]
            values = [batched.loss, batched.weight, *(logged.value for logged in batched.logged)]
            if len(expected) != len(values):
                return "it logs other values than members one by one"
            if any(gap_of(*pair, tolerance) for pair in zip(expected, values, strict=True)):
                return "its results differ from those of members one by one"
        if self._have_other_gradients(results, computed, tolerance):
            return "its gradients differ from those of members one by one"
        return ""

    def _have_other_gradients(
        self, results: list[StepResult], computed: list[StepResult], tolerance: Tolerance
    ) -> bool:
        parameters = [parameter for parameter in self._members.parameters if parameter.stacked.requires_grad]
        # The graph of the batched step is not needed any more, those of the others are.
        loss = torch.stack([_loss_of(result) for result in computed]).sum()
        stacked = torch.autograd.grad(
            loss, [parameter.stacked for parameter in parameters], allow_unused=True, materialize_grads=True
        )
        for member, result in enumerate(results):
            gradients = torch.autograd.grad(
                _loss_of(result),
                [parameter.members[member] for parameter in parameters],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            allowed = tolerance.of_gradients(gradients)
            if any(gap_of(one, all_of[member], allowed) for one, all_of in zip(gradients, stacked, strict=True)):
                return True
        return False

    def _roots(self) -> dict[str, Root]:
        """Return the parts of the module, whose attributes and what these lead to a step may change."""
        # What every module has is torch's or Lightning's.
        left_out = frozenset(vars(LightningModule()))
        # Without metrics.
        parts = set(map(id, self._members.parts()))
        module = self._members.modules[0]
        kind = type(module).__name__
        return {
            f"{kind}.{name}" if name else kind: Root(part, left_out)
            for name, part in module.named_modules()
            if id(part) in parts
        }

    def _versions(self) -> list[int] | None:
        """Return the versions of the members' own parameters, which are others than those of the stacked ones."""
        return versions(tensor for parameter in self._members.parameters for tensor in parameter.members)

    def _copied_buffers(self) -> list[Tensor]:
        return [buffer.clone() for buffer in self._batched.buffers]

    def _end(self, reason: str) -> None:
        """Compute all further steps one by one, if there is a reason."""
        self.reason = reason
        if reason:
            rank_zero_info(f"The members' steps are computed one by one: {reason}.")


def _loss_of(result: StepResult) -> Tensor:
    assert result.loss is not None
    return result.loss
