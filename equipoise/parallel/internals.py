"""What replicas and shards must touch of the inner workings of torch, torchmetrics and Python, in one place.

Each name stands here with the reason why nothing public does; `tests/parallel/test_internals.py` notices when one of
them changes.
"""

import copy
from collections.abc import Iterable, Sequence
from multiprocessing import forkserver
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from equipoise.errors import StepError
from equipoise.parallel.sampling import in_turn

__all__ = [
    "STRUCTURE",
    "MetricState",
    "buffers_of",
    "children_of",
    "collective_count",
    "has_hooks",
    "has_module_hooks",
    "hooks_of",
    "is_compiled",
    "join_metrics",
    "merge_metric_states",
    "metrics_of",
    "other_state",
    "parameters_of",
    "preloaded_by_user",
    "restore_metric_state",
    "set_device_of",
    "shell_of",
    "states_to_send",
    "take_metric_state",
    "versions",
    "with_dataset",
    "with_own_iterator",
    "with_sampler",
]

# The entries of a module's `__dict__` that hold what is registered in it. A shallow copy needs dictionaries of its own,
# and `register_module` and its siblings check what need not be checked here.
STRUCTURE = ("_parameters", "_buffers", "_modules")


_VERSION = attrgetter("_version")


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


def versions(tensors: Iterable[Tensor]) -> list[int] | None:
    """A number for each tensor that changes when it is changed in place; None where one keeps no count of changes."""
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:  # a tensor made in inference mode
        return None


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` or `module.compile()` was applied; only what they leave in the module tells."""
    state = vars(module)
    return "dynamo_ctx" in state or any(state.get(key) for key in ("_compiled_call_impl", "_compiler_ctx"))


def has_hooks(parameter: Tensor) -> bool:
    """Whether somebody registered a hook on a parameter's gradient."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def set_device_of(module: nn.Module, device: torch.device) -> None:
    """Makes `module.device` say where its batches are, though its parts lie on several devices."""
    state: dict[str, Any] = vars(module)
    if "_device" in state:  # Lightning's modules know it by what `to` was last called with
        state["_device"] = device


def has_module_hooks(module: nn.Module) -> bool:
    """Whether somebody registered a hook on a module's forward or backward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def hooks_of(parameter: Tensor) -> list[tuple[str, Any]]:
    """The hooks on a parameter's gradient, each with the method that registers it."""
    before = parameter._backward_hooks or {}
    after = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return [("register_hook", hook) for hook in before.values()] + [
        ("register_post_accumulate_grad_hook", hook) for hook in after.values()
    ]


# Processes


def collective_count() -> int:
    """How many collective operations this process has begun, in all groups.

    Torch numbers them, to find out which process hangs, and tells nobody.
    """
    world: Any = dist.distributed_c10d
    return sum(group._get_sequence_number_for_group() for group in world._world.pg_map)


# Metrics

MetricState = dict[str, Any]
_COUNT, _COMPUTED, _LAST = "_update_count", "_computed", "_forward_cache"
_EMPTY_WRAPPER = {_COMPUTED: None, _LAST: None}  # of a metric without states, which never counts
_EMPTY = {_COUNT: 0} | _EMPTY_WRAPPER


def take_metric_state(metric: Metric) -> MetricState:
    """Takes away what a metric has gathered and leaves it as new; the count of updates has no public name.

    Not by `reset`, which wrappers hand on to other metrics, and which empties lists in place.
    """
    names = _states_of(metric)
    empty = _EMPTY if names else _EMPTY_WRAPPER
    state: MetricState = {name: getattr(metric, name) for name in (*names, *empty)}
    fresh: MetricState = {}
    for name in names:
        default = metric._defaults[name]
        fresh[name] = [] if isinstance(default, list) else default.detach().clone().to(metric.device)
    restore_metric_state(metric, fresh | empty)
    return state


def _states_of(metric: Metric) -> list[str]:
    """The names of the states that a metric holds itself; wrappers show those of the metric inside as theirs."""
    return [name for name in metric._defaults if name in vars(metric)]


def other_state(metric: Metric) -> dict[str, Any]:
    """What a metric counts or collects beside its states, which nobody could put together from parts."""
    own = set(metric._defaults) | set(_EMPTY)
    held = {name: value for name, value in vars(metric).items() if name not in own and not isinstance(value, bool)}
    numbers = {name: value for name, value in held.items() if isinstance(value, int | float)}
    return numbers | {name: len(value) for name, value in held.items() if type(value) is list}


def restore_metric_state(metric: Metric, state: MetricState) -> None:
    """Gives back what `take_metric_state` took."""
    for name, value in state.items():
        setattr(metric, name, value)


def merge_metric_states(
    metrics: list[Metric], before: list[MetricState], parts: list[list[Metric]], weights: list[Any]
) -> None:
    """Makes metrics hold what they held before a batch, and what their copies gathered from the parts of the batch.

    Values that `forward` returned for the parts are computed anew for the batch, when all metrics hold that of the
    batch alone: one may compute from others.

    Args:
        metrics: The metrics.
        before: What `take_metric_state` took from each before the batch.
        parts: The copies of each, in the order of the parts.
        weights: The weights of the parts.

    Raises:
        StepError: If a metric cannot be put together from parts.
    """
    batches = [_batch_state(metric, copies, weights) for metric, copies in zip(metrics, parts, strict=True)]
    caches = [[part._forward_cache for part in copies if part._forward_cache is not None] for copies in parts]
    for metric, batch in zip(metrics, batches, strict=True):
        restore_metric_state(metric, batch | {_COMPUTED: None})
    for metric, values in zip(metrics, caches, strict=True):
        value = metric.compute() if len(values) > 1 else values[0] if values else None
        metric._forward_cache = value
    for metric, earlier, batch in zip(metrics, before, batches, strict=True):
        if not batch.get(_COUNT):  # it was not updated, or has no states
            restore_metric_state(metric, earlier if metric._forward_cache is None else {})
            continue
        counts = [earlier[_COUNT], batch[_COUNT]]
        both = batch
        if counts[0]:
            both = {name: _reduced(metric, name, [earlier[name], batch[name]], counts) for name in _states_of(metric)}
        restore_metric_state(metric, both | {_COUNT: sum(counts), _COMPUTED: None})


def _batch_state(metric: Metric, copies: list[Metric], weights: list[Any]) -> MetricState:
    """What a metric's copies have gathered, without those that saw nothing."""
    names, device = _states_of(metric), metric.device
    updated = [(part, weight) for part, weight in zip(copies, weights, strict=True) if part._update_count]
    if not names or not updated:
        return {}
    held = [{name: _on(getattr(part, name), device) for name in names} for part, _ in updated]
    weights = [weight for _, weight in updated]
    state = {name: _reduced(metric, name, [each[name] for each in held], weights) for name in names}
    return state | {_COUNT: max(part._update_count for part, _ in updated)}


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


def metrics_of(metrics: nn.Module) -> list[Metric]:
    """A metric and those inside it, or all metrics of a collection."""
    return [part for part in metrics.modules() if isinstance(part, Metric)]


def states_to_send(metrics: nn.Module) -> list[MetricState]:
    """The state and the count of updates of each of `metrics_of`, on the CPU."""
    cpu = torch.device("cpu")
    return [
        {name: _on(getattr(metric, name), cpu) for name in _states_of(metric)} | {_COUNT: metric._update_count}
        for metric in metrics_of(metrics)
    ]


def join_metrics(metrics: nn.Module, of_processes: Sequence[list[MetricState]]) -> None:
    """Lets metrics hold what those of several processes have gathered, and compute without asking them again.

    Other than torchmetrics' own exchange, a process that saw nothing counts for nothing, a mean is weighted by the
    number of updates, and lists come into the order of batches that were dealt out in turn.

    Args:
        metrics: A metric or a collection; the same in all processes.
        of_processes: What `states_to_send` returned in each, in the order of ranks.
    """
    for metric, states in zip(metrics_of(metrics), zip(*of_processes, strict=True), strict=True):
        metric.distributed_available_fn = _never
        updated = [state for state in states if state[_COUNT]]
        if not updated:
            continue
        counts = [state[_COUNT] for state in updated]
        names = _states_of(metric)
        lists = [name for name in names if isinstance(updated[0][name], list)]
        aligned = all(len({len(state[name]) for name in lists}) <= 1 for state in updated)
        joined = {name: _joined(metric, name, [state[name] for state in updated], counts, aligned) for name in names}
        joined = {name: _on(value, metric.device) for name, value in joined.items()}
        restore_metric_state(metric, joined | {_COUNT: sum(counts), _COMPUTED: None})


def _never() -> bool:
    return False


def _joined(metric: Metric, name: str, states: list[Any], counts: list[int], aligned: bool) -> Any:
    reduce: Any = metric._reductions[name]
    if isinstance(states[0], list):
        items = in_turn(states) if aligned else [item for state in states for item in state]
        return items if reduce is None or reduce is dim_zero_cat else reduce(items)
    if reduce is None and len(states) > 1:
        return torch.stack(states)  # as torchmetrics leaves them; the metric itself puts them together
    return _reduced(metric, name, states, counts)


# Loaders


def with_sampler(loader: DataLoader[Any], sampler: Any, *, batches: bool = False) -> DataLoader[Any]:
    """A copy of a loader that draws from another sampler.

    A DataLoader refuses to exchange its sampler, and a subclass cannot be constructed again without knowing its
    arguments; so the copy's attributes are set below that guard, and its cached iterator, which is private, is
    dropped.

    Args:
        loader: The loader.
        sampler: A sampler or, if `batches`, a batch sampler.
        batches: Which of the two it is.
    """
    other = copy.copy(loader)
    state = vars(other)
    state["_iterator"] = None
    if batches:
        state["batch_sampler"] = sampler
    else:
        state["sampler"] = sampler
        if loader.batch_sampler is not None and loader.batch_size is not None:
            state["batch_sampler"] = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    return other


def with_dataset(loader: DataLoader[Any], dataset: Any) -> DataLoader[Any]:
    """A copy of a loader that reads other data, made as by `with_sampler`."""
    other = copy.copy(loader)
    vars(other).update(_iterator=None, dataset=dataset)
    return other


def with_own_iterator(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A copy of a loader that can be read while the loader itself is; made as by `with_sampler`.

    With `persistent_workers` a loader has one iterator, which begins anew whenever the loader is read again. The copy
    has one of its own, with workers of its own, which end with it.

    Args:
        loader: The loader.
    """
    other = copy.copy(loader)
    vars(other)["_iterator"] = None
    return other


# Processes


def preloaded_by_user() -> list[str]:
    """Return the modules that `multiprocessing.set_forkserver_preload` was given last: no public name reads them."""
    return list(vars(forkserver._forkserver).get("_preload_modules", []))
