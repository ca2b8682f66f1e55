"""Recovery from out-of-memory errors, which a module in shards does not have."""

from equipoise.strategies.recovery_support import RecoverySupport

__all__ = ["NOT_REPEATED", "ShardedRecovery"]

NOT_REPEATED = (
    "Under strategy='fsdp' all processes gather the weights together, so one cannot do its step again alone."
    " Take a smaller batch_size with accumulate_grad_batches, activation_checkpointing, or more processes."
)
"""Why no step is repeated, and what to do instead."""


class ShardedRecovery(RecoverySupport):
    """States why no step can be repeated: the other processes wait for this one within the forward."""

    def why_not(self, *, training: bool, leave_out: bool) -> str:
        """Return the reason; see `RecoverySupport.why_not`."""
        return NOT_REPEATED
