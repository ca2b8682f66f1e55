"""Reasons why the optimiser's step cannot be a part of the backward."""

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback as LightningCallback
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.optim import LBFGS, Optimizer

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.classes import is_a
from equipoise.interop.torch.optimizers import has_step_hooks, is_of_torch
from equipoise.parallel.optimizers.combined_optimizer import CombinedOptimizer
from equipoise.precision import Precision
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.hooks.hooks import Hooks, overrides

if TYPE_CHECKING:
    from equipoise.trainer.state.run_state import RunState

__all__ = ["check_clipping", "check_optimizer", "check_run"]

# Methods of the module that run between the backward and the optimiser's step, or in place of the step.
_METHODS = (
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
)

# Hooks of callbacks that see all gradients.
_HOOKS = ("on_after_backward", "on_before_optimizer_step")

# Modules whose callbacks do not read gradients there.
_READ_NO_GRADIENTS = ("lightning.pytorch.", "pytorch_lightning.", "equipoise.")

# What a strategy does with gradients of several backwards, devices or processes.
_MEMBERS = (
    "forward_backward",
    "backward",
    "collect_gradients",
    "finish_gradients",
    "setup_optimizer",
)


def check_run(
    state: "RunState", module: LightningModule, strategy: Strategy, hooks: Hooks, precision: Precision
) -> None:
    """Check that a fit can step parameters within the backward, as far as that shows before its optimiser is created.

    Args:
        state: The settings and callbacks.
        module: The user's module.
        strategy: The strategy.
        hooks: The hooks.
        precision: The precision.

    Raises:
        ConfigurationError: If it cannot; the message names the reason.
    """
    check_clipping(state)
    reason = _why_not_in_settings(state, module, strategy, precision) or _why_not_in_hooks(state, module, hooks)
    if reason is not None:
        raise _refusal(reason)


def check_clipping(state: "RunState") -> None:
    """Check that gradients are not clipped by their norm.

    Raises:
        ConfigurationError: If they are.
    """
    if state.gradient_clip_val and (state.gradient_clip_algorithm or "norm") == "norm":
        raise _refusal(
            "gradient_clip_val by norm needs all gradients before the first step (gradient_clip_algorithm='value' does"
            " not)"
        )


def check_optimizer(optimizer: Any) -> None:
    """Check that an optimiser treats each parameter by itself.

    Args:
        optimizer: The value that `configure_optimizers` has returned.

    Raises:
        ConfigurationError: If that is not certain.
    """
    if isinstance(optimizer, CombinedOptimizer):
        raise _refusal(f"`configure_optimizers` returned {len(optimizer.optimizers)} optimisers")
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer) or not is_of_torch(optimizer):
        raise _refusal(f"{kind} is not one of torch's optimisers, and may look at several parameters in one step")
    if isinstance(optimizer, LBFGS):
        raise _refusal("LBFGS steps all parameters together and computes a batch several times")
    if has_step_hooks(optimizer):
        raise _refusal(f"a hook on the step of {kind} would run for each parameter")


def _refusal(reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"step_in_backward=True steps each parameter as soon as it has its gradient, which is not possible here:"
        f" {reason}. Leave one of the two out."
    )


def _why_not_in_settings(
    state: "RunState", module: LightningModule, strategy: Strategy, precision: Precision
) -> str | None:
    # Each reason stands for gradients that are needed together, or after the backward.
    if not module.automatic_optimization:
        return f"{type(module).__name__} optimises by hand (automatic_optimization=False)"
    if state.accumulate_grad_batches != 1:
        return f"accumulate_grad_batches={state.accumulate_grad_batches} adds up gradients of several batches"
    if precision.scaler is not None:
        return "precision='16-mixed' looks at all gradients before it decides on a step (bf16-mixed does not)"
    if state.compiles_steps:
        return "compile gives all gradients together"
    if state.captures_steps:
        return "capture gives all gradients together"
    # One device in one process, without duties of a strategy's own between backward and step.
    has_duties = any(getattr(type(strategy), name) is not getattr(Strategy, name) for name in _MEMBERS)
    if has_duties or not strategy.keeps_batches_whole:
        return f"strategy={strategy.name!r} puts gradients together after the backward ('single_device' does not)"
    return None


def _why_not_in_hooks(state: "RunState", module: LightningModule, hooks: Hooks) -> str | None:
    for name in _METHODS:
        if hooks.bind_module(name) is not None:
            return f"{type(module).__name__}.{name} runs when all gradients are there"
    if hooks.recovers:
        return "OOMRecovery repeats steps, but parameters would have changed in the failed one"
    for callback in state.callbacks:
        if is_a(callback, GradientAccumulationScheduler):
            return "a GradientAccumulationScheduler adds up gradients of several batches"
        if type(callback).__module__.startswith(_READ_NO_GRADIENTS):
            continue
        for name in _HOOKS:
            if overrides(callback, name, LightningCallback):
                return f"{type(callback).__name__}.{name} runs when all gradients are there"
    return None
