"""Private names of the optimisers of torch.

Each name stands here with the reason why nothing public does; a test notices when one of them changes.
"""

from torch.optim import Optimizer

__all__ = ["has_step_hooks", "unscales_by_itself"]


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return True if the optimiser has step pre-hooks. They receive the closure, so it must be passed."""
    return bool(optimizer._optimizer_step_pre_hooks)


def unscales_by_itself(optimizer: Optimizer) -> bool:
    """Return True if an optimiser unscales inside its step, as fused ones do; GradScaler reads the same attribute."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
