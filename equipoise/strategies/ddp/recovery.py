"""Recovery under DDP where the forward communicates, so that no process can repeat a step alone.

While the others wait for gradients, a process may repeat its step or split it: its exchange of gradients comes later,
but comes once. An exchange within the forward, as of SyncBatchNorm or of a step that gathers, would come twice or not
at all, and the others would read it as another exchange. So such exchanges are detected. Then an error of memory
ends the run with a message, and with it the other processes, which would wait forever.
"""

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from equipoise.errors import StepError
from equipoise.interop.adapters import DDP_RECOVERY, check_feature
from equipoise.interop.distributed.processes import collective_count
from equipoise.strategies.ddp.exchange.gradient_exchange import GradientExchange
from equipoise.strategies.distributed.sample_shares import ProcessShares
from equipoise.strategies.recovery_support import RecoverySupport

__all__ = ["DDPRecovery"]

T = TypeVar("T")
_WAY_OUT = "Take a smaller batch_size with accumulate_grad_batches, or leave the communication (sync_batchnorm) out."


class DDPRecovery(RecoverySupport):
    """Repeats the steps of one process, while the other processes wait for its gradients.

    Args:
        module: The user's module.
        exchange: The exchange of gradients.
        shares: The shares of the samples of a step, some of which may be measured.

    Attributes:
        is_enabled: Whether steps may be repeated. Then the collective operations in them are detected.
    """

    def __init__(self, module: nn.Module, exchange: GradientExchange, shares: ProcessShares) -> None:
        self.is_enabled = False
        self._module = module
        self._exchange = exchange
        self._shares = shares
        # Both by whether the step trains.
        self._communicates = {True: False, False: False}
        self._has_completed_step = {True: False, False: False}

    def enable(self) -> None:
        """Exchange gradients by the native engine from now on, which can repeat a step; see `RecoverySupport`."""
        check_feature(DDP_RECOVERY)
        if not self.is_enabled:
            self.is_enabled = True
            self._exchange.repeat_steps()
            # It does not communicate in evaluations.
            self._communicates[True] = any(isinstance(layer, nn.SyncBatchNorm) for layer in self._module.modules())

    def run(self, compute: Callable[[], T], *, training: bool, in_micro_batches: bool) -> T:
        """Run the forward of a step on a batch or micro-batch.

        Raises:
            StepError: If the step communicates, but computes a micro-batch while others compute their full batch.
        """
        if not self.is_enabled:
            return compute()
        # Also a step that fails may have communicated before.
        count_before = collective_count()
        try:
            result = compute()
        finally:
            if collective_count() != count_before:
                self._communicates[training] = True
        self._has_completed_step[training] = True
        if in_micro_batches and self._communicates[training]:
            kind = "a training" if training else "an evaluation"
            raise StepError(
                "A batch is computed in parts since it ran out of memory, but all processes communicate in the forward"
                f" of {kind} step, and the others compute theirs as a whole."
                f" {_WAY_OUT}"
            )
        return result

    def why_not(self, *, training: bool, leave_out: bool) -> str:
        """Return why a step cannot be repeated: it communicates in its forward; see `RecoverySupport.why_not`."""
        if self._communicates[training]:
            return f"All processes communicate in the forward, so one cannot do its step again alone. {_WAY_OUT}"
        if leave_out and not self._has_completed_step[training]:
            return (
                "The first batch of a process cannot be left out: it is not known yet whether others wait for it within"
                " their forward. A smaller batch_size, or OOMRecovery(policy='split'), would help."
            )
        return ""

    def discard(self) -> bool:
        """Interrupt an exchange, which the next attempt completes; see `RecoverySupport.discard`."""
        self._shares.begin_again()
        return self._exchange.break_off()
