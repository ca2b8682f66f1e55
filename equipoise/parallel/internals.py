"""What replicas must touch of torch's and torchmetrics' inner workings, in one place.

Each name stands here with the reason why nothing public does; `tests/parallel/test_internals.py` notices when one of
them changes.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from equipoise.errors import StepError

__all__ = [
    "STRUCTURE",
    "MetricState",
    "buffers_of",
    "children_of",
    "has_hooks",
    "is_compiled",
    "merge_metric_states",
    "parameters_of",
    "restore_metric_state",
    "shell_of",
    "take_metric_state",
    "versions",
]

# The entries of a module's `__dict__` that hold what is registered in it. A shallow copy needs dictionaries of its own,
# and `register_module` and its siblings check what need not be checked here.
STRUCTURE = ("_parameters", "_buffers", "_modules")


# Modules


def shell_of(module: nn.Module) -> nn.Module:
    """A copy of a module without anything registered in it; attributes are shared."""
    shell: nn.Module = object.__new__(type(module))
    vars(shell).update(vars(module))
    for name in STRUCTURE:
        vars(shell)[name] = {}
    return shell


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dictionary of a module's own parameters, which may be written to."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The dictionary of a module's own buffers, which may be written to."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dictionary of a module's children, which may be written to."""
    return module._modules


def versions(tensors: Iterable[Tensor]) -> int | None:
    """A number that changes when one of the tensors is changed in place; None where one keeps no count of changes."""
    try:
        return sum([tensor._version for tensor in tensors])
    except RuntimeError:  # a tensor made in inference mode
        return None


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` or `module.compile()` was applied; only what they leave in the module tells."""
    state = vars(module)
    return "dynamo_ctx" in state or any(state.get(key) for key in ("_compiled_call_impl", "_compiler_ctx"))


def has_hooks(parameter: Tensor) -> bool:
    """Whether somebody registered a hook on a parameter's gradient."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


# Metrics

MetricState = dict[str, Any]
_COUNT, _COMPUTED, _LAST = "_update_count", "_computed", "_forward_cache"


def take_metric_state(metric: Metric) -> MetricState:
    """Takes away what a metric has gathered and leaves it as new; the count of updates has no public name."""
    state = dict(metric.metric_state) | {name: getattr(metric, name) for name in (_COUNT, _COMPUTED, _LAST)}
    for name, default in metric._defaults.items():  # before reset, which empties lists in place
        setattr(metric, name, [] if isinstance(default, list) else default.detach().clone().to(metric.device))
    metric.reset()
    return state


def restore_metric_state(metric: Metric, state: MetricState) -> None:
    """Gives back what `take_metric_state` took."""
    for name, value in state.items():
        setattr(metric, name, value)


def merge_metric_states(metric: Metric, before: MetricState, parts: list[Metric], weights: list[Any]) -> None:
    """Makes a metric hold what it held before a batch, and what its copies gathered from the parts of the batch.

    A value that `forward` returns for the batch is computed anew, from all parts.

    Args:
        metric: One of the copies, or their original.
        before: What `take_metric_state` took from it before the batch.
        parts: The copies, in the order of the parts.
        weights: The weights of the parts.

    Raises:
        StepError: If the metric cannot be put together from parts.
    """
    updated = [(part, weight) for part, weight in zip(parts, weights, strict=True) if part._update_count]
    if not updated:
        restore_metric_state(metric, before)
        return
    parts, count = [part for part, _ in updated], max(part._update_count for part, _ in updated)
    forwarded = any(part._forward_cache is not None for part in parts)
    reductions, device = metric._reductions, metric.device
    held = [{name: _on(getattr(part, name), device) for name in reductions} for part in parts]
    batch = {
        name: _reduced(metric, name, [state[name] for state in held], [weight for _, weight in updated])
        for name in reductions
    }
    restore_metric_state(metric, batch | {_COUNT: count, _COMPUTED: None})
    value = metric.compute() if forwarded and len(parts) > 1 else parts[0]._forward_cache
    if before[_COUNT]:
        counts = [before[_COUNT], count]
        batch = {name: _reduced(metric, name, [before[name], batch[name]], counts) for name in reductions}
    restore_metric_state(metric, batch | {_COUNT: before[_COUNT] + count, _COMPUTED: None, _LAST: value})


def _on(state: Any, device: torch.device) -> Any:
    return [item.to(device) for item in state] if isinstance(state, list) else state.to(device)


def _reduced(metric: Metric, name: str, states: list[Any], weights: list[Any]) -> Any:
    """One state of a metric, put together as the metric says."""
    if len(states) == 1:
        return states[0]
    reduce, first = metric._reductions[name], states[0]
    if isinstance(first, list):
        return [item for state in states for item in state]
    if reduce is dim_zero_cat:
        return torch.cat([state.reshape(-1) if state.ndim == 0 else state for state in states])
    if reduce is dim_zero_mean:
        return sum(state * (weight / sum(weights)) for state, weight in zip(states, weights, strict=True))
    if reduce in (dim_zero_sum, dim_zero_max, dim_zero_min) or callable(reduce):
        return reduce(torch.stack(states))
    raise StepError(
        f"The metric {type(metric).__name__} cannot be put together from parts of a batch: it does not say how its"
        f" state {name!r} is reduced. Take parallelize='forward', where metrics see whole batches, or update it in"
        " `on_train_batch_end` and its siblings."
    )
