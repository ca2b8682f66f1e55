"""Remedies for the first difference between a run and one device."""

from typing import Any

from equipoise.extensions.verification.findings import BUFFER, GRADIENT, LOSS, NUMBER, WEIGHT, Finding

__all__ = ["remedy_for"]

_REMEDIES = {
    LOSS: "Look for what depends on the rank or on the number of samples in a part: a branch by rank, a sum in the"
    " place of a mean, a loss that compares samples with one another.",
    GRADIENT: "Look for a branch by rank, a sum in the place of a mean, a hook on a parameter, which sees the gradient"
    " of one process, and gradients that a step changes by the samples of its process: average those by self.all_gather"
    " first.",
    WEIGHT: "The gradients before the step agree, so weights were changed outside of the optimiser, by values that"
    " differ between processes. Compute such values from the samples of all: self.all_gather(value).mean(0).",
    BUFFER: "Each process has buffers of its own, and those of the main process are kept. Compute what they hold from"
    " the samples of all: self.all_gather(value).mean(0), or Trainer(sync_batchnorm=True).",
    NUMBER: "Let what skips or repeats a step depend on `batch_idx`, or on the mean of all processes.",
}
_BITS = (
    "For the same bits set Trainer(deterministic=True), which calls torch.use_deterministic_algorithms, and"
    " CUBLAS_WORKSPACE_CONFIG=:4096:8; TF32 on or off everywhere, as many threads of CPUs everywhere, and devices of"
    " one kind. Draw from the global generators, and keep state in buffers."
)
# Arguments of the Trainer that change how a step is computed.
_WAYS = (
    "compile",
    "capture",
    "step_in_backward",
    "offload_activations",
    "activation_checkpointing",
    "fused_optimizer",
)


def remedy_for(difference: Finding, trainer: Any, *, to_the_bit: bool) -> str:
    """Return advice about a difference, as sentences.

    Args:
        difference: The first difference.
        trainer: The user's trainer.
        to_the_bit: Whether one device was to compute the same bits.
    """
    if to_the_bit:
        return _BITS
    # 1. The kind of value.
    advice = _REMEDIES.get(difference.kind, "")
    # 2. Ways to compute a step, any of which may be the cause.
    ways = [name for name in _WAYS if trainer.constructor_arguments.get(name)]
    ways += [type(callback).__name__ for callback in trainer.callbacks if getattr(callback, "saves_memory", False)]
    if ways:
        advice = f"Leave out {', '.join(ways)} one by one: verify shows which of them it is. {advice}"
    return advice
