"""Fused optimisers: one kernel updates all parameters; see `Trainer(fused_optimizer=True)`."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from equipoise.interop.torch.optimizers import fuse, is_of_torch
from equipoise.notices import rank_zero_warn
from equipoise.parallel.optimizer_parameters import optimizer_parameters

__all__ = ["fuse_optimizers", "with_present_choice"]

# Types of devices for which torch has fused kernels of all optimisers that have an option for them.
_DEVICES = ("cpu", "cuda")


def fuse_optimizers(optimizers: Iterable[Optimizer], module: nn.Module) -> None:
    """Fuse the optimisers for which the user has chosen neither `fused` nor `foreach`; warn where torch cannot."""
    for optimizer in optimizers:
        if _is_chosen_by_user(optimizer):
            continue
        reason = _why_not_fused(optimizer, module)
        if reason is None:
            fuse(optimizer)
        else:
            rank_zero_warn(f"fused_optimizer=True has no effect on {type(optimizer).__name__}: {reason}.")


def with_present_choice(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved state of an optimiser, fused where the optimiser is fused now, and nowhere else."""
    if not is_of_torch(optimizer):
        return dict(state)
    groups = [dict(group) for group in state.get("param_groups", ())]
    for group, present in zip(groups, optimizer.param_groups, strict=False):
        if bool(group.get("fused")) != bool(present.get("fused")):
            group["fused"] = present.get("fused")
            group["foreach"] = present.get("foreach")
    return {**state, "param_groups": groups}


def _is_chosen_by_user(optimizer: Optimizer) -> bool:
    groups = optimizer.param_groups
    return any(group.get("fused") is not None or group.get("foreach") is not None for group in groups)


def _why_not_fused(optimizer: Optimizer, module: nn.Module) -> str | None:
    if not is_of_torch(optimizer):
        return "it is not one of torch's own"
    if "fused" not in optimizer.defaults:
        return "torch has no fused form of it"
    for parameter in optimizer_parameters(optimizer):
        if not parameter.is_floating_point():
            return f"a parameter has the dtype {parameter.dtype}"
        if parameter.device.type not in _DEVICES:
            return f"torch has no fused form for the device {parameter.device}"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "differentiable=True has no fused form"
    for name, submodule in module.named_modules():
        if getattr(submodule, "sparse", False) is True:
            return f"the gradients of {name} are sparse"
    return None
