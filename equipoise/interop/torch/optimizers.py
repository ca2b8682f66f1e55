"""Private names of the optimisers of torch.

Each name stands here with the reason why nothing public does; a test notices when one of them changes.
"""

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["fuse", "has_step_hooks", "unscales_by_itself"]

# The constructor of an optimiser sets this attribute with `fused=True`; nothing public sets it later.
_SUPPORTS_SCALING = "_step_supports_amp_scaling"


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return True if the optimiser has step pre-hooks. They receive the closure, so it must be passed."""
    return bool(optimizer._optimizer_step_pre_hooks)


def unscales_by_itself(optimizer: Optimizer) -> bool:
    """Return True if an optimiser unscales inside its step, as fused ones do; GradScaler reads the same attribute."""
    return bool(getattr(optimizer, _SUPPORTS_SCALING, False))


def fuse(optimizer: Optimizer) -> None:
    """Let an optimiser update its parameters by one kernel, as with `fused=True`.

    Args:
        optimizer: An optimiser of torch with an option `fused`.
    """
    optimizer.defaults["fused"] = True
    for group in optimizer.param_groups:
        group["fused"] = True
    setattr(optimizer, _SUPPORTS_SCALING, True)
    # Some optimisers count the steps from their constructor on. A fused kernel needs the count on the device.
    for parameter, state in optimizer.state.items():
        step = state.get("step")
        if isinstance(step, Tensor):
            state["step"] = step.to(parameter.device)
