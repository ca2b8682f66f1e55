"""A run in which several processes compute together: what it holds, and how it ends."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from equipoise.extensions.fsdp.sharded_module import ShardedModule
from equipoise.extensions.fsdp.state.portable_state import ShardedState
from equipoise.extensions.fsdp.steps import ShardedSteps
from equipoise.strategies.distributed.process_strategy import ProcessRun
from equipoise.strategies.distributed.window_totals import Apart
from equipoise.strategies.recovery_support import RecoverySupport

__all__ = ["NOT_REPEATED", "ShardedRecovery", "ShardedRun"]

# Seconds for which a run that has failed waits for the checkpoint that is being written in the background.
_PATIENCE = 60.0

# Why no step is repeated, and what to do instead.
NOT_REPEATED = (
    "Under strategy='fsdp' all processes gather the weights together, so one cannot do its step again alone."
    " Take a smaller batch_size with accumulate_grad_batches, activation_checkpointing, or more processes."
)


class ShardedRecovery(RecoverySupport):
    """States why no step can be repeated: the other processes wait for this one within the forward."""

    def why_not(self, *, training: bool, leave_out: bool) -> str:
        """Return the reason; see `RecoverySupport.why_not`."""
        return NOT_REPEATED


@dataclass(kw_only=True)
class ShardedRun(ProcessRun):
    """State of a run in this process, where several compute together.

    Attributes:
        sharded: The module in shards.
        steps: Computes steps in all processes together.
        weight: The exchange of a window's total weight.
        portable: Full states.
        recovery: States why no step can be repeated.
        by_hand: True if the module optimises by hand.
        groups: Further process groups, which are left at the end of a run that has not failed.
        callbacks: The callbacks, which lose their copies of the module at the end.
        is_cut: True if `configure_model` has cut layers, so that parameters lie on several meshes.
        failed: True if the run ended with an error, after which processes exchange nothing.
    """

    sharded: ShardedModule
    steps: ShardedSteps
    weight: Apart
    portable: ShardedState
    recovery: ShardedRecovery
    by_hand: bool
    groups: ExitStack
    callbacks: Sequence[Any]
    is_cut: bool
    failed: bool = False

    def end(self, error: BaseException | None) -> None:
        """Note how the run has ended."""
        self.failed = error is not None

    def close(self) -> None:
        """Complete the last checkpoint, and give the module its own parameters again, whole."""
        self.steps.close()
        for callback in self.callbacks:
            self.sharded.forget_copies(vars(callback))
        # Hooks and metrics are the user's again, even if writing or gathering fails.
        try:
            self._finish_saving()
        finally:
            try:
                self.sharded.restore(self.portable.optimizers, gather=not self.failed)
            finally:
                super().close()

    def _finish_saving(self) -> None:
        """Wait for the checkpoint that is being written in the background."""
        folders = self.portable.folders
        if folders is not None:
            folders.finish(_PATIENCE if self.failed else None)
        if not self.failed:
            self.groups.close()
