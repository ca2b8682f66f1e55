"""Reasons why the steps of a run cannot be compiled."""

from typing import TYPE_CHECKING

import torch
from lightning.pytorch import LightningModule
from torch.optim import LBFGS

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.classes import takes_iterator
from equipoise.interop.lightning.self_log import has_own_log
from equipoise.interop.torch.compiling import why_not_compiled
from equipoise.interop.torch.modules import has_gradient_hooks
from equipoise.strategies.strategy import Strategy

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext
    from equipoise.trainer.state.run_state import RunState

__all__ = ["check_strategy", "why_eager"]

# Hooks between the forward and the backward, which are one function when they are compiled.
_HOOKS_BETWEEN = ("on_before_backward", "on_before_zero_grad")
_METHODS_BETWEEN = ("backward", "optimizer_zero_grad")


def check_strategy(strategy: Strategy, state: "RunState") -> None:
    """Check that a strategy computes whole steps in one place.

    Args:
        strategy: The strategy.
        state: The settings of the run.

    Raises:
        ConfigurationError: If it does not.
    """
    argument = "capture"
    value: bool | str = state.captures_steps
    if not value:
        argument = "compile"
        value = state.compiles_steps
    members = ("forward_backward", "backward", "collect_gradients")
    if any(getattr(type(strategy), name) is not getattr(Strategy, name) for name in members):
        raise ConfigurationError(
            f"{argument}={value!r} works on one device, but strategy={strategy.name!r} computes a step in several"
            f" parts or processes. Leave {argument} out, or choose strategy='single_device'."
        )
    if state.captures_steps and strategy.root_device.type != "cuda":
        raise ConfigurationError(
            f"capture=True replays steps as CUDA graphs, but this run computes on {strategy.root_device}. Leave capture"
            " out, choose accelerator='cuda', or take compile=True, which has kernels for other devices, too."
        )


def why_eager(context: "RunContext", *, skip_backward: bool) -> str | None:
    """Return the reason why no step of this epoch can be compiled; None if there is none.

    Args:
        context: The run.
        skip_backward: Whether steps run the forward only.
    """
    module = context.module
    hooks = context.hooks
    feature = "capture" if context.state.captures_steps else "compile"
    reason = why_not_compiled(feature)
    if reason is not None:
        return reason
    if takes_iterator(module, "training_step"):
        return "it pulls its batches from an iterator"
    if skip_backward:
        return "its steps run no backward"
    if hooks.is_profiled:
        return "a profiler measures forward and backward by themselves"
    if torch.is_anomaly_enabled() or context.state.detect_anomaly or context.state.detect_nonfinite:
        return "detect_anomaly and detect_nonfinite look into each operation or module"
    if isinstance(context.state.optimizers[0], LBFGS):
        return "LBFGS computes a batch several times"
    for name in _HOOKS_BETWEEN:
        if hooks.bind(name) is not None:
            return f"the hook {name} runs between forward and backward"
    for name in _METHODS_BETWEEN:
        if hooks.bind_module(name) is not None:
            return f"the module overrides {name}"
    return _why_module_is_eager(module)


def _why_module_is_eager(module: LightningModule) -> str | None:
    """Return the reason that lies in the module."""
    if has_own_log(module):
        return "the module has a method `log` of its own"
    for name, parameter in module.named_parameters():
        if has_gradient_hooks(parameter):
            return f"the parameter {name} has a hook on its gradient"
    return None
