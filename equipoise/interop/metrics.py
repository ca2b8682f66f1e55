"""States of metrics: read, removed and restored, which torchmetrics has no public names for."""

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from equipoise.interop.module_metrics import named_metrics
from equipoise.interop.refusal import refusal

__all__ = [
    "COMPUTED",
    "COUNT",
    "LAST",
    "MetricCopy",
    "MetricState",
    "check_names",
    "default_of",
    "last_batch_value",
    "link_collections",
    "load_metric_states",
    "metric_states",
    "on_device",
    "other_state",
    "reduction_of",
    "restore_metric_state",
    "state_on_cpu",
    "states_of",
    "take_metric_state",
]

# The value that `forward` has returned; the value that `compute` has returned, until the next update; the number of
# updates, which has no public setter. Lightning reads the first of them, too.
LAST = "_forward_cache"
COMPUTED = "_computed"
COUNT = "_update_count"
# The values of states before the first update, and the functions that reduce states.
_DEFAULTS = "_defaults"
_REDUCTIONS = "_reductions"
_NEEDED = (COMPUTED, COUNT, _DEFAULTS, _REDUCTIONS)


def check_names(metric: Metric) -> None:
    """Refuse what cannot do without the names."""
    attributes = vars(metric)
    missing = [f"Metric.{name}" for name in _NEEDED if name not in attributes]
    if missing:
        raise refusal(
            "A metric in copies, in parts of a batch, of several processes or in a checkpoint",
            "torchmetrics",
            missing,
            "Take another strategy or callback, or a module without metrics.",
        )


def last_batch_value(metric: Metric) -> Any:
    """Return the value that a metric computed for its last batch.

    `forward` returns this value to the user, but `self.log` receives only the metric.
    """
    return getattr(metric, LAST, None)


def link_collections(module: nn.Module) -> None:
    """Bring metrics up to date that share states in a collection, before their states are read.

    An update changes the states of one of them. In torchmetrics 1.5 the others receive these, and the count of updates,
    only when the collection is asked for them.

    Args:
        module: A module with collections, or a collection.
    """
    for part in module.modules():
        if isinstance(part, MetricCollection):
            # The first call says that no copies were handed out; the second one gives all the states of the one.
            part.values(copy_state=False)
            part.values(copy_state=False)


def metric_states(module: nn.Module) -> dict[str, Any]:
    """Return copies of the states of all metrics; `state_dict` leaves them out unless they are persistent."""
    link_collections(module)
    return {
        name: {"state": _copied(metric.metric_state), "count": metric.update_count}
        for name, metric in named_metrics(module).items()
    }


def load_metric_states(module: nn.Module, states: dict[str, Any]) -> None:
    """Load the states of metrics onto the metrics' devices."""
    metrics = named_metrics(module)
    for name, saved in states.items():
        metric = metrics.get(name)
        if metric is None:
            continue
        check_names(metric)
        # A checkpoint is read to the CPU, while the next update computes on the metric's device.
        copies = _copied(saved["state"], metric.device)
        restore_metric_state(metric, {**copies, COUNT: saved["count"], COMPUTED: None})


def _copied(state: dict[str, Any], device: torch.device | None = None) -> dict[str, Any]:
    """Return copies, on a device or each on its own, since metrics change their states in place."""

    def copy(tensor: Tensor) -> Tensor:
        target = device or tensor.device
        return tensor.detach().to(target, copy=True)

    copies: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, list):
            copies[name] = [copy(item) for item in value]
        else:
            copies[name] = copy(value)
    return copies


MetricState = dict[str, Any]
# A metric without states of its own never counts updates.
_EMPTY_WRAPPER = {COMPUTED: None, LAST: None}
_EMPTY = {COUNT: 0} | _EMPTY_WRAPPER


def take_metric_state(metric: Metric) -> MetricState:
    """Remove and return the accumulated state of a metric, and leave the metric as new.

    This does not call `reset`: wrappers forward `reset` to other metrics, and it empties lists in place.

    Raises:
        ConfigurationError: If torchmetrics keeps the state in an unknown way.
    """
    check_names(metric)
    # 1. Read the state.
    names = states_of(metric)
    empty = _EMPTY if names else _EMPTY_WRAPPER
    state = {name: getattr(metric, name) for name in (*names, *empty)}
    # 2. Replace it by the defaults.
    fresh: MetricState = {}
    for name in names:
        default = default_of(metric, name)
        fresh[name] = default if isinstance(default, list) else default.to(metric.device)
    restore_metric_state(metric, fresh | empty)
    return state


def states_of(metric: Metric) -> list[str]:
    """Return the names of the states that a metric holds itself.

    A wrapper also shows the states of the metric inside it; these are left out.
    """
    attributes = vars(metric)
    return [name for name in metric.metric_state if name in attributes]


def other_state(metric: Metric) -> dict[str, Any]:
    """Return numbers, and lengths of lists, that a metric keeps beside its states.

    Such values cannot be merged from the parts of a batch.
    """
    # Flags are no counts, although a bool is an int.
    mergeable = {*metric.metric_state, *_EMPTY}
    numbers: dict[str, Any] = {}
    for name, value in vars(metric).items():
        if name in mergeable or isinstance(value, bool):
            continue
        if isinstance(value, int | float):
            numbers[name] = value
        elif type(value) is list:
            numbers[name] = len(value)
    return numbers


def restore_metric_state(metric: Metric, state: MetricState) -> None:
    """Restore what `take_metric_state` returned."""
    for name, value in state.items():
        setattr(metric, name, value)


class MetricCopy:
    """A state of a metric, as `merge_metric_states` reads that of a copy of the metric.

    Args:
        state: The state that `take_metric_state` returned.
    """

    def __init__(self, state: MetricState) -> None:
        self.update_count: int = state.get(COUNT, 0)
        vars(self).update(state)


def state_on_cpu(state: MetricState) -> MetricState:
    """Return a state that `take_metric_state` returned, without graphs and on the CPU, for other processes."""
    cpu = torch.device("cpu")
    sent: MetricState = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            value = value.detach()
        sent[name] = on_device(value, cpu) if isinstance(value, Tensor | list) else value
    return {**sent, COMPUTED: None}


def on_device(state: Any, device: torch.device) -> Any:
    """Return a state, a tensor or a list of tensors, on a device."""
    if isinstance(state, list):
        return [item.to(device) for item in state]
    return state.to(device)


def reduction_of(metric: Metric, name: str) -> Any:
    """Return the function that reduces a state of a metric; None if the metric declares none."""
    return getattr(metric, _REDUCTIONS)[name]


def default_of(metric: Metric, name: str) -> Any:
    """Return the value of a state before the first update."""
    default = getattr(metric, _DEFAULTS)[name]
    if isinstance(default, list):
        return []
    return default.detach().clone()
