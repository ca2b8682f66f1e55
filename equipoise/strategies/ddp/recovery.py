"""Recovery under DDP where the forward communicates, so that no process can repeat a step alone.

While the others wait for gradients, a process may repeat its step or split it: its exchange of gradients comes later,
but comes once. An exchange within the forward, as of SyncBatchNorm or of a step that gathers, would come twice or not
at all, and the others would read it as another exchange. So the guard detects such exchanges. Then an error of memory
ends the run with a message, and with it the other processes, which would wait forever.
"""

from typing import Any

from torch import nn

from equipoise.errors import StepError
from equipoise.interop.torch.processes import collective_count

__all__ = ["CollectiveGuard"]

_WAY_OUT = "Take a smaller batch_size with accumulate_grad_batches, or leave the communication (sync_batchnorm) out."


class CollectiveGuard:
    """Detects the collective operations that a process runs in its steps.

    Args:
        module: The user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        synchronised = any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules())
        # Both by whether the step trains. SyncBatchNorm does not communicate in evaluations.
        self._communicates = {True: synchronised, False: False}
        self._has_completed_step = {True: False, False: False}

    def watched(self, step: Any, *, training: bool) -> Any:
        """Return the same step, whose calls go through `run`."""
        return _Watched(self, step, training)

    def run(self, step: Any, part: Any, *, training: bool) -> Any:
        """Run a step on a batch or micro-batch.

        Args:
            step: The step.
            part: The batch or micro-batch.
            training: Whether the step trains.

        Returns:
            The result of the step.

        Raises:
            StepError: If the step communicates, but computes a micro-batch while others compute their full batch.
        """
        count_before = collective_count()
        try:
            result = step(part)
        finally:
            if collective_count() != count_before:
                self._communicates[training] = True
        self._has_completed_step[training] = True
        if step.in_micro_batches and self._communicates[training]:
            raise StepError(
                "A batch is computed in parts since it ran out of memory, but all processes communicate in the forward"
                f" of {'a training' if training else 'an evaluation'} step, and the others compute theirs as a whole."
                f" {_WAY_OUT}"
            )
        return result

    def obstacle(self, *, training: bool, leave_out: bool) -> str:
        """Return why a step that ran out of memory cannot be repeated; empty if it can.

        Args:
            training: Whether the step trains.
            leave_out: Whether the batch is to be left out.
        """
        if self._communicates[training]:
            return f"All processes communicate in the forward, so one cannot do its step again alone. {_WAY_OUT}"
        if leave_out and not self._has_completed_step[training]:
            return (
                "The first batch of a process cannot be left out: nobody knows yet whether others wait for it within"
                " their forward. A smaller batch_size, or OOMRecovery(policy='split'), would help."
            )
        return ""


class _Watched:
    """A step whose calls go through the guard."""

    def __init__(self, guard: CollectiveGuard, step: Any, training: bool) -> None:
        self._guard = guard
        self._step = step
        self._training = training

    def __call__(self, part: Any) -> Any:
        return self._guard.run(self._step, part, training=self._training)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)
