"""Private names of torchmetrics: the states of metrics, taken, restored and merged.

Each name stands here with the reason why nothing public does; a test notices when one of them changes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from equipoise.errors import StepError
from equipoise.interleave import interleave

__all__ = [
    "MetricState",
    "join_metrics",
    "last_batch_value",
    "load_metric_states",
    "merge_metric_states",
    "metric_states",
    "metrics_of",
    "other_state",
    "restore_metric_state",
    "states_to_send",
    "take_metric_state",
]


def last_batch_value(metric: Metric) -> Any:
    """What a metric computed for its last batch; `forward` returns it, but `self.log` receives the metric."""
    return metric._forward_cache


def metric_states(module: nn.Module) -> dict[str, Any]:
    """Copies of the states of all metrics; `state_dict` leaves them out unless they are persistent."""
    metrics = ((name, child) for name, child in module.named_modules() if isinstance(child, Metric))
    return {name: {"state": _copied(metric.metric_state), "count": metric.update_count} for name, metric in metrics}


def load_metric_states(module: nn.Module, states: dict[str, Any]) -> None:
    """Load the states of metrics onto the metrics' devices; the count of updates has no public setter."""
    children = dict(module.named_modules())
    for name, saved in states.items():
        metric = children.get(name)
        if isinstance(metric, Metric):
            # A checkpoint is read to the CPU, while the next update computes on the metric's device.
            for key, value in _copied(saved["state"], metric.device).items():
                setattr(metric, key, value)
            metric._update_count = saved["count"]
            metric._computed = None


def _copied(state: dict[str, Any], device: torch.device | None = None) -> dict[str, Any]:
    """Return copies, since metrics change their states in place.

    Args:
        state: Tensors and lists of tensors by name.
        device: Device of the copies. Default: where each tensor lies.
    """

    def copy(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device or tensor.device, copy=True)

    return {
        key: [copy(item) for item in value] if isinstance(value, list) else copy(value) for key, value in state.items()
    }


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
        items = interleave(states) if aligned else [item for state in states for item in state]
        return items if reduce is None or reduce is dim_zero_cat else reduce(items)
    if reduce is None and len(states) > 1:
        return torch.stack(states)  # as torchmetrics leaves them; the metric itself puts them together
    return _reduced(metric, name, states, counts)
