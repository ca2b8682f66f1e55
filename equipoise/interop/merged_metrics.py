"""States of metrics merged: of the parts of a batch, of several processes, and of checkpoints."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from equipoise.errors import ConfigurationError, StepError
from equipoise.interleave import interleave
from equipoise.interop.metrics import (
    COMPUTED,
    COUNT,
    LAST,
    MetricState,
    check_names,
    default_of,
    last_batch_value,
    link_collections,
    on_device,
    reduction_of,
    restore_metric_state,
    states_of,
)
from equipoise.interop.module_metrics import named_metrics

__all__ = [
    "MeanOfMetrics",
    "join_metrics",
    "merge_metric_states",
    "merge_saved_states",
    "metrics_of",
    "states_to_send",
]


class MeanOfMetrics(Metric):
    """The mean of the values of several metrics, for logs.

    Args:
        metrics: The metrics, which are updated elsewhere.
    """

    def __init__(self, metrics: Sequence[Metric]) -> None:
        # In a tuple, so that they are no children.
        self.metrics = tuple(metrics)
        super().__init__()
        # Torchmetrics' wrapper would keep the first value, since this metric is never updated itself.
        self.compute = self._mean  # type: ignore[method-assign]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the metrics are updated elsewhere."""

    def compute(self) -> Any:
        """Return the mean of the metrics' values."""
        return self._mean()

    def reset(self) -> None:
        """Reset the metrics."""
        for metric in self.metrics:
            metric.reset()

    def _mean(self) -> Any:
        return _mean_of([metric.compute() for metric in self.metrics])

    def last_value(self) -> Any:
        """Return the mean of the values that the metrics computed for their last batches; see `last_batch_value`."""
        values = [last_batch_value(metric) for metric in self.metrics]
        if any(value is None for value in values):
            return None
        return _mean_of(values)


# What torchmetrics sets there is ignored.
setattr(MeanOfMetrics, LAST, property(MeanOfMetrics.last_value, lambda *_: None))


def _mean_of(values: Sequence[Any]) -> Any:
    """Return the mean of tensors. Values of another kind cannot be logged, so any of them will do for the error."""
    if not all(isinstance(value, Tensor) for value in values):
        return values[0]
    stacked = torch.stack(list(values))
    if not stacked.is_floating_point():
        stacked = stacked.float()
    return stacked.mean(0)


def merge_metric_states(
    metrics: list[Metric], before: list[MetricState], parts: Sequence[Sequence[Any]], weights: list[Any]
) -> None:
    """Merge into metrics their state before a batch and the states of their copies, one per part of the batch.

    Values that `forward` returned for the parts are computed again for the batch. This happens while all metrics hold
    the state of this batch alone, because one metric may compute from others.

    Args:
        metrics: The metrics.
        before: The states that `take_metric_state` returned for each before the batch.
        parts: The copies of each, in the order of the parts: metrics, or a `MetricCopy` for each.
        weights: The weights of the parts.

    Raises:
        StepError: If the states of a metric cannot be merged.
    """
    # 1. Merge the parts, and note the values of `forward` before the next step replaces them.
    batches = []
    forward_values = []
    copies_by_metric = zip(metrics, parts, strict=True)
    for metric, copies in copies_by_metric:
        batch = _batch_state(metric, copies, weights)
        values = _forward_values(copies)
        batches.append(batch)
        forward_values.append(values)
    # 2. Let all metrics hold the state of the batch alone.
    states = zip(metrics, batches, strict=True)
    for metric, batch in states:
        restore_metric_state(metric, {**batch, COMPUTED: None})
    # 3. Compute the value of the batch.
    for metric, values in zip(metrics, forward_values, strict=True):
        _set_batch_value(metric, values)
    # 4. Add the state before the batch.
    for metric, earlier, batch in zip(metrics, before, batches, strict=True):
        _add_earlier_state(metric, earlier, batch)


def _forward_values(copies: Sequence[Any]) -> list[Any]:
    """Return the values that `forward` of the copies returned."""
    values = [getattr(copy, LAST, None) for copy in copies]
    return [value for value in values if value is not None]


def _set_batch_value(metric: Metric, values: list[Any]) -> None:
    """Set the value of the last batch from the values of its parts."""
    value = None
    if len(values) > 1:
        value = metric.compute()
    elif values:
        value = values[0]
    restore_metric_state(metric, {LAST: value})


def _add_earlier_state(metric: Metric, earlier: MetricState, batch: MetricState) -> None:
    """Merge the state before a batch into a metric that holds the state of the batch."""
    if not batch.get(COUNT):
        # The metric was not updated, or has no states.
        if last_batch_value(metric) is None:
            restore_metric_state(metric, earlier)
        return
    counts = [earlier[COUNT], batch[COUNT]]
    merged = dict(batch)
    if earlier[COUNT]:
        for name in states_of(metric):
            value = earlier[name]
            merged[name] = _reduced(metric, name, [value, batch[name]], counts)
    merged[COUNT] = sum(counts)
    merged[COMPUTED] = None
    restore_metric_state(metric, merged)


def _batch_state(metric: Metric, copies: Sequence[Any], weights: list[Any]) -> MetricState:
    """Merge the states of a metric's copies, without copies that were not updated."""
    names = states_of(metric)
    updated = []
    updated_weights = []
    for copy, weight in zip(copies, weights, strict=True):
        if copy.update_count:
            updated.append(copy)
            updated_weights.append(weight)
    if not names or not updated:
        return {}
    state: MetricState = {}
    for name in names:
        values = [on_device(getattr(copy, name), metric.device) for copy in updated]
        state[name] = _reduced(metric, name, values, updated_weights)
    state[COUNT] = max(copy.update_count for copy in updated)
    return state


def _reduced(metric: Metric, name: str, states: list[Any], weights: list[Any], *, interleaved: bool = False) -> Any:
    """Merge one state of a metric with the reduction that the metric declares; lists stay lists."""
    if len(states) == 1:
        return states[0]
    reduction = reduction_of(metric, name)
    if isinstance(states[0], list):
        return interleave(states) if interleaved else [item for items in states for item in items]
    if reduction is dim_zero_cat:
        # Scalars have no dimension to concatenate.
        vectors = []
        for state in states:
            if state.ndim == 0:
                state = state.reshape(1)
            vectors.append(state)
        return torch.cat(vectors)
    if reduction is dim_zero_mean:
        total = sum(weights)
        mean = 0
        for state, weight in zip(states, weights, strict=True):
            mean = mean + state * (weight / total)
        return mean
    # A function of the user reduces the stacked states, as in torchmetrics.
    if reduction in (dim_zero_sum, dim_zero_max, dim_zero_min) or callable(reduction):
        return reduction(torch.stack(states))
    raise StepError(
        f"The metric {type(metric).__name__} cannot be put together from parts of a batch: it does not say how its"
        f" state {name!r} is reduced. Take parallelize='forward', where metrics see whole batches, or update it in"
        " `on_train_batch_end` and its siblings."
    )


def metrics_of(metrics: nn.Module) -> list[Metric]:
    """Return a metric and those inside it, or all metrics of a collection."""
    return [child for child in metrics.modules() if isinstance(child, Metric)]


def states_to_send(metrics: nn.Module) -> list[MetricState]:
    """Return the state and the count of updates of each of `metrics_of`, on the CPU."""
    link_collections(metrics)
    cpu = torch.device("cpu")
    states = []
    for metric in metrics_of(metrics):
        state = {name: on_device(getattr(metric, name), cpu) for name in states_of(metric)}
        state[COUNT] = metric.update_count
        states.append(state)
    return states


def join_metrics(metrics: nn.Module, of_processes: Sequence[list[MetricState]]) -> None:
    """Join into metrics the states of several processes; the metrics then compute without further communication.

    It differs from torchmetrics' own exchange: a process without updates does not count, a mean is weighted by the
    number of updates, and lists come into the order of batches that were dealt out in turn.

    Args:
        metrics: A metric or a collection; the same in all processes.
        of_processes: The states that `states_to_send` returned in each process, in the order of ranks.
    """
    # The lists of processes become lists of metrics.
    states_by_metric = zip(*of_processes, strict=True)
    for metric, states in zip(metrics_of(metrics), states_by_metric, strict=True):
        check_names(metric)
        # Without this, `compute` would exchange the joined states once more.
        metric.distributed_available_fn = _never
        updated = [state for state in states if state[COUNT]]
        if updated:
            _join_metric(metric, updated)


def _never() -> bool:
    return False


def _join_metric(metric: Metric, states: list[MetricState]) -> None:
    """Join into a metric the states of the processes that updated it."""
    counts = [state[COUNT] for state in states]
    names = states_of(metric)
    device = metric.device
    # Items of lists can come into the order of the batches only if there is one for each batch.
    interleaved = _lists_are_aligned(names, states)
    joined: MetricState = {}
    for name in names:
        value = _joined(metric, name, [state[name] for state in states], counts, interleaved)
        joined[name] = on_device(value, device)
    joined[COUNT] = sum(counts)
    joined[COMPUTED] = None
    restore_metric_state(metric, joined)


def _lists_are_aligned(names: list[str], states: list[MetricState]) -> bool:
    """Check that in each process all lists have one length, so that items at one index are of one batch."""
    list_names = [name for name in names if isinstance(states[0][name], list)]
    for state in states:
        lengths = {len(state[name]) for name in list_names}
        if len(lengths) > 1:
            return False
    return True


def _joined(metric: Metric, name: str, states: list[Any], counts: list[int], interleaved: bool) -> Any:
    """Join one state of several processes."""
    reduction = reduction_of(metric, name)
    is_list = isinstance(states[0], list)
    if not is_list and reduction is None and len(states) > 1:
        # torchmetrics leaves such states stacked as well; the metric itself reduces them. In older versions a state of
        # one number has a dimension or none, by the number of updates.
        if len({state.numel() for state in states}) == 1:
            states = [state.reshape(states[0].shape) for state in states]
        return torch.stack(states)
    joined = _reduced(metric, name, states, counts, interleaved=interleaved)
    if is_list and reduction not in (None, dim_zero_cat):
        return reduction(joined)
    return joined


# States of metrics in checkpoints, for another number of processes

SavedState = dict[str, Any]


def merge_saved_states(
    module: nn.Module,
    of_processes: Sequence[dict[str, SavedState]],
    rank: int,
    count: int,
    *,
    left_out: Sequence[str] = (),
) -> dict[str, SavedState]:
    """Merge the states of metrics of several processes, for one of another number of processes.

    Rank 0 gets what the processes have together, and the other ranks begin anew. A mean goes to all ranks, since
    torchmetrics takes the mean over the ranks without weights.

    Args:
        module: The user's module, whose metrics declare how their states are reduced.
        of_processes: The states that `metric_states` returned in each process, in the order of ranks.
        rank: The rank of this process.
        count: The number of processes now.
        left_out: Names of metrics that are left out if their states cannot be merged. Default: none.

    Raises:
        ConfigurationError: If a metric does not say how one of its states is merged, and there are too few processes.
    """
    metrics = named_metrics(module)
    merged = {}
    for name, first in of_processes[0].items():
        updated = _updated_states(name, of_processes)
        metric = metrics.get(name)
        if metric is None or not updated:
            merged[name] = first
            continue
        check_names(metric)
        if not _has_separate_state(metric, updated[0]):
            merged[name] = _merged_for_rank(metric, updated, rank)
        elif name not in left_out:
            merged[name] = _separate_for_rank(metric, name, updated, rank, count)
    return merged


def _updated_states(name: str, of_processes: Sequence[dict[str, SavedState]]) -> list[SavedState]:
    """Return the states of a metric in the processes that have updated it."""
    states = [states_of_process.get(name) for states_of_process in of_processes]
    return [state for state in states if state is not None and state["count"]]


def _merged_for_rank(metric: Metric, saved: list[SavedState], rank: int) -> SavedState:
    """Return the state of one metric in one of the processes."""
    counts = [state["count"] for state in saved]
    states = [state["state"] for state in saved]
    first = states[0]
    names = [name for name in states_of(metric) if name in first]
    # Items of lists come into the order of the batches, if there is one for each batch.
    interleaved = _lists_are_aligned(names, states)
    merged: MetricState = dict(first)
    for name in names:
        values = [state[name] for state in states]
        is_mean = isinstance(values[0], Tensor) and reduction_of(metric, name) is dim_zero_mean
        if rank and not is_mean:
            merged[name] = default_of(metric, name)
        else:
            # Lists stay lists, since the metric continues appending.
            merged[name] = _reduced(metric, name, values, counts, interleaved=interleaved)
    # A process updates a metric once for each batch, so this counts the batches.
    return {"state": merged, "count": max(counts)}


def _has_separate_state(metric: Metric, saved: SavedState) -> bool:
    """Return True if a metric has a tensor without a reduction: it merges such states itself, when it computes."""
    tensors = [name for name in states_of(metric) if isinstance(saved["state"].get(name), Tensor)]
    return any(reduction_of(metric, name) is None for name in tensors)


def _separate_for_rank(metric: Metric, name: str, saved: list[SavedState], rank: int, count: int) -> SavedState:
    """Return one of the states that cannot be merged, or that of a new metric."""
    holders = len(saved)
    if holders > count:
        raise ConfigurationError(
            f"The checkpoint holds states of the metric {name!r} ({type(metric).__name__}) of {holders} processes,"
            " which can be computed but not merged: it declares no reduction. Resume with at least as many processes,"
            " or from a checkpoint of an epoch's end."
        )
    if rank < holders:
        return saved[rank]
    defaults = {state_name: default_of(metric, state_name) for state_name in states_of(metric)}
    return {"state": saved[0]["state"] | defaults, "count": 0}
