"""Reasons why the steps of a run cannot be compiled."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch.optim import LBFGS

from equipoise.errors import ConfigurationError
from equipoise.extensions.compiled.interop.compiling import backends, check_options, why_not_compiled
from equipoise.extensions.compiled.interop.features import CAPTURE, COMPILE
from equipoise.interop.lightning.self_log import has_own_log
from equipoise.interop.torch.modules import has_gradient_hooks
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.hooks.hooks import Hooks

if TYPE_CHECKING:
    from equipoise.trainer.state.run_state import RunState

__all__ = ["check_strategy", "compiles_blocks", "why_eager"]

# Hooks between the forward and the backward, which are one function when they are compiled.
_HOOKS_BETWEEN = ("on_before_backward", "on_before_zero_grad")
_METHODS_BETWEEN = ("backward", "optimizer_zero_grad")


def compiles_blocks(strategy: Strategy, state: "RunState", *, by_hand: bool = False) -> bool:
    """Return whether the blocks of a network are compiled one by one, and not the step as a whole.

    Args:
        strategy: The strategy.
        state: The settings of the run.
        by_hand: Whether the module optimises by hand. Default: False.
    """
    if state.captures_steps:
        return False
    return state.block_options is not None or by_hand or not _computes_whole_steps(strategy)


def _computes_whole_steps(strategy: Strategy) -> bool:
    members = ("forward_backward", "backward", "collect_gradients")
    return all(getattr(type(strategy), name) is getattr(Strategy, name) for name in members)


def check_strategy(strategy: Strategy, state: "RunState", *, by_hand: bool = False) -> None:
    """Check that a strategy computes whole steps in one place, or calls blocks as they are.

    Args:
        strategy: The strategy.
        state: The settings of the run.
        by_hand: Whether the module optimises by hand. Default: False.

    Raises:
        ConfigurationError: If it does neither.
    """
    if state.captures_steps:
        _check_capture(strategy)
    elif compiles_blocks(strategy, state, by_hand=by_hand):
        _check_blocks(strategy, state, by_hand=by_hand)


def _check_capture(strategy: Strategy) -> None:
    if not _computes_whole_steps(strategy):
        raise ConfigurationError(
            f"capture=True works on one device, but strategy={strategy.name!r} computes a step in several"
            " parts or processes. Leave capture out, or choose strategy='single_device'."
        )
    if strategy.root_device.type != "cuda":
        raise ConfigurationError(
            f"capture=True replays steps as CUDA graphs, but this run computes on {strategy.root_device}. Leave capture"
            " out, choose accelerator='cuda', or take compile=True, which has kernels for other devices, too."
        )


def _check_blocks(strategy: Strategy, state: "RunState", *, by_hand: bool) -> None:
    if not _computes_whole_steps(strategy) and not getattr(strategy, "may_compile_blocks", False):
        raise ConfigurationError(
            f"compile={state.compiles_steps!r} compiles blocks of the network, but strategy={strategy.name!r} does not"
            " call them as they are, or not in all processes together. Leave compile out, or choose"
            " strategy='single_device', 'ddp' or 'fsdp'."
        )
    if state.compiles_steps == "auto":
        why = "the module optimises by hand" if by_hand else f"strategy={strategy.name!r} computes them in parts"
        raise ConfigurationError(
            f"compile='auto' measures whole steps, but {why}. Take compile=True, which compiles blocks of the network."
        )
    _check_options(state.block_options or {})


def _check_options(block_options: Mapping[str, Any]) -> None:
    backend = block_options.get("backend", "inductor")
    options = block_options.get("options")
    if backend != "inductor" and backend not in backends():
        raise ConfigurationError(f"compile: there is no backend {backend!r}. Backends are {', '.join(backends())}.")
    if options and backend != "inductor":
        raise ConfigurationError(f"compile: options are settings of the backend 'inductor', not of {backend!r}.")
    if options:
        check_options(options)


def why_eager(state: "RunState", module: LightningModule, hooks: Hooks, *, skip_backward: bool) -> str | None:
    """Return the reason why no step of this epoch can be compiled; None if there is none.

    Args:
        state: The settings and optimisers.
        module: The user's module.
        hooks: The hooks.
        skip_backward: Whether steps run the forward only.
    """
    reason = why_not_compiled(CAPTURE if state.captures_steps else COMPILE)
    if reason is not None:
        return reason
    if skip_backward:
        return "its steps run no backward"
    if hooks.is_profiled:
        return "a profiler measures forward and backward by themselves"
    if torch.is_anomaly_enabled() or state.detect_anomaly or state.detect_nonfinite:
        return "detect_anomaly and detect_nonfinite look into each operation or module"
    if isinstance(state.optimizers[0], LBFGS):
        return "LBFGS computes a batch several times"
    for name in _HOOKS_BETWEEN:
        if hooks.bind(name) is not None:
            return f"the hook {name} runs between forward and backward"
    for name in _METHODS_BETWEEN:
        if hooks.bind_module(name) is not None:
            return f"the module overrides {name}"
    return _why_module_is_eager(module)


def _why_module_is_eager(module: LightningModule) -> str | None:
    if has_own_log(module):
        return "the module has a method `log` of its own"
    for name, parameter in module.named_parameters():
        if has_gradient_hooks(parameter):
            return f"the parameter {name} has a hook on its gradient"
    return None
