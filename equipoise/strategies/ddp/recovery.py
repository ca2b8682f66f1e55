"""Recovery under DDP where the forward communicates, so that no process can repeat a step alone.

While the others wait for gradients, a process may repeat its step or cut it: its exchange of gradients comes later, but
comes once. An exchange within the forward, as of SyncBatchNorm or of a step that gathers, would come twice, or not at
all, and be taken for another one. So such exchanges are noticed, and then running out of memory is an error that says
so; it ends the other processes, which wait in vain.
"""

from typing import Any

from torch import nn

from equipoise.errors import StepError
from equipoise.interop.torch.processes import collective_count

__all__ = ["CollectiveGuard"]

_WAY_OUT = "Take a smaller batch_size with accumulate_grad_batches, or leave the communication (sync_batchnorm) out."


class CollectiveGuard:
    """Notices what a process exchanges in its steps.

    Args:
        module: The user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        synchronised = any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules())
        self._talks = {True: synchronised, False: False}  # by whether it trains: evaluating, these layers do not
        self._done = {True: False, False: False}

    def watched(self, step: Any, *, training: bool) -> Any:
        """The same step, watched."""
        return _Watched(self, step, training)

    def run(self, step: Any, part: Any, *, training: bool) -> Any:
        """Runs a step on a part of a batch.

        Raises:
            StepError: If it communicates, but sees a part of a batch that the others see as a whole.
        """
        before = collective_count()
        try:
            answer = step(part)
        finally:
            self._talks[training] = self._talks[training] or collective_count() != before
        self._done[training] = True
        if step.in_pieces and self._talks[training]:
            raise StepError(
                "A batch is computed in parts since it ran out of memory, but all processes communicate in the forward"
                f" of {'a training' if training else 'an evaluation'} step, and the others compute theirs as a whole."
                f" {_WAY_OUT}"
            )
        return answer

    def obstacle(self, *, training: bool, leave_out: bool) -> str:
        """Why a step that ran out of memory is not done again; empty if it can be.

        Args:
            training: Or evaluating.
            leave_out: Whether the batch is to be left out.
        """
        if self._talks[training]:
            return f"All processes communicate in the forward, so one cannot do its step again alone. {_WAY_OUT}"
        if leave_out and not self._done[training]:
            return (
                "The first batch of a process cannot be left out: nobody knows yet whether others wait for it within"
                " their forward. A smaller batch_size, or OOMRecovery(policy='split'), would help."
            )
        return ""


class _Watched:
    """A step whose calls go through the guard."""

    def __init__(self, guard: CollectiveGuard, step: Any, training: bool) -> None:
        self._guard, self._step, self._training = guard, step, training

    def __call__(self, part: Any) -> Any:
        return self._guard.run(self._step, part, training=self._training)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)
