"""Steps and hooks of the optimisers of torch.

Private names stand here with the reason why nothing public does; a test notices when one of them changes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from equipoise.interop.adapters import find, find_if_tested

__all__ = [
    "fuse",
    "has_step_hooks",
    "has_step_pre_hooks",
    "is_of_torch",
    "may_decide_by_loss",
    "only_parameter",
    "plain_step",
    "steps_as_torch",
    "unscales_by_itself",
]

# Torch opens a record for its profiler around each step of an optimiser, even if none is at work. Nothing public
# shows whether a profiler is at work, or whether hooks for all optimisers were registered.
_profiler_enabled: Callable[[], bool] | None = find_if_tested("torch._C._autograd._profiler_enabled")
_global_pre_hooks: dict[int, Any] | None = find("torch.optim.optimizer._global_optimizer_pre_hooks")
_global_post_hooks: dict[int, Any] | None = find("torch.optim.optimizer._global_optimizer_post_hooks")

# The constructor of an optimiser sets this attribute with `fused=True`; nothing public sets it later.
_SUPPORTS_SCALING = "_step_supports_amp_scaling"
# The hooks before the step of an optimiser, and after it. Nothing public lists them.
_PRE_HOOKS = "_optimizer_step_pre_hooks"
_POST_HOOKS = "_optimizer_step_post_hooks"


def has_step_pre_hooks(optimizer: Optimizer) -> bool:
    """Return True if the optimiser has step pre-hooks, or does not show them. They receive the closure."""
    return bool(vars(optimizer).get(_PRE_HOOKS, True))


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return True if a function runs before or after each step of the optimiser."""
    attributes = vars(optimizer)
    own = attributes.get(_PRE_HOOKS, True) or attributes.get(_POST_HOOKS, True)
    return bool(own or _global_pre_hooks or _global_post_hooks)


def is_of_torch(optimizer: object) -> bool:
    """Return True for an optimiser of torch itself, not for subclasses that others have defined.

    Newer classes name `torch.optim` as their module, older ones a module within it.
    """
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def may_decide_by_loss(optimizer: object) -> bool:
    """Return True for an optimiser that may read the loss of its closure; those of torch but LBFGS only return it."""
    return isinstance(optimizer, LBFGS) or not is_of_torch(optimizer)


@contextmanager
def only_parameter(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> Iterator[None]:
    """Let an optimiser have one parameter alone for a `with` block. No public method takes parameters away.

    Args:
        optimizer: The optimiser.
        group: The group of the parameter.
        parameter: The parameter.
    """
    groups = optimizer.param_groups
    parameters = group["params"]
    group["params"] = [parameter]
    optimizer.param_groups = [group]
    try:
        yield
    finally:
        group["params"] = parameters
        optimizer.param_groups = groups


def plain_step(optimizer: Optimizer) -> Callable[[], Any]:
    """Return a function that does what `optimizer.step()` does, but opens no record if no profiler is at work.

    The function looks in each call for hooks, for a profiler, and for a `step` that was replaced. With one of them it
    calls `optimizer.step()`.

    Args:
        optimizer: An optimiser of torch, whose step needs no closure.
    """
    optimizer_class = type(optimizer)
    recorded_step = optimizer_class.step
    unrecorded_step: Callable[[Optimizer], Any] | None = getattr(recorded_step, "__wrapped__", None)
    # Torch marks the function that it has put around the optimiser's own one.
    if unrecorded_step is None or not getattr(recorded_step, "hooked", False):
        return optimizer.step
    # Without one of these names the function below could not see a hook or a profiler.
    if _profiler_enabled is None or _global_pre_hooks is None or _global_post_hooks is None:
        return optimizer.step
    attributes = vars(optimizer)
    pre_hooks = attributes.get(_PRE_HOOKS)
    post_hooks = attributes.get(_POST_HOOKS)
    if pre_hooks is None or post_hooks is None:
        return optimizer.step
    is_profiled = _profiler_enabled

    def step() -> Any:
        has_hooks = pre_hooks or post_hooks or _global_pre_hooks or _global_post_hooks
        is_replaced = "step" in attributes or optimizer_class.step is not recorded_step
        if has_hooks or is_replaced or is_profiled():
            return optimizer.step()
        return unrecorded_step(optimizer)

    return step


def steps_as_torch(optimizer: Optimizer) -> bool:
    """Return True if the step of an optimiser is that of a class of torch, and nothing of the user's runs with it."""
    attributes = vars(optimizer)
    registries = (attributes.get(_PRE_HOOKS), attributes.get(_POST_HOOKS), _global_pre_hooks, _global_post_hooks)
    hooks = [hook for registry in registries if registry for hook in registry.values()]
    if not is_of_torch(optimizer) or not all(map(_is_ours, hooks)):
        return False
    # A scheduler notes that its optimiser was stepped, by a function around the step.
    step = attributes.get("step")
    is_schedulers = getattr(step, "__globals__", {}).get("__name__") == "torch.optim.lr_scheduler"
    return step is None or (is_schedulers and step.__wrapped__ is type(optimizer).step)


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("equipoise.")


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
