"""Metrics of torchmetrics in several processes: computed over all of them, also where some have no batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

from equipoise.interop.module_metrics import named_metrics
from equipoise.parallel.communication.object_exchange import gather_objects

__all__ = ["synchronise_metrics"]


def synchronise_metrics(module: nn.Module, processes_per_batch: int = 1) -> Callable[[], None]:
    """Compute the metrics of a module over all processes.

    A metric for which the user has set `dist_sync_fn` keeps it.

    Args:
        module: The user's module.
        processes_per_batch: Number of successive ranks that compute each batch together, of which one counts.
            Default: 1.

    Returns:
        A function that restores the metrics.
    """
    # 1. Note the settings of all metrics.
    settings_of_metrics = [_MetricSettings(metric, processes_per_batch) for metric in named_metrics(module).values()]
    # 2. Change them.
    for settings in settings_of_metrics:
        settings.change()

    def restore() -> None:
        for settings in settings_of_metrics:
            settings.restore()

    return restore


class _MetricSettings:
    """The user's settings of a metric, while it is computed over all processes.

    Args:
        metric: The metric.
        processes_per_batch: Number of successive ranks that compute each batch together.
    """

    def __init__(self, metric: Metric, processes_per_batch: int) -> None:
        self._metric = metric
        self._processes_per_batch = processes_per_batch
        self._gather_before = metric.dist_sync_fn
        self._available_before = metric.distributed_available_fn
        self._on_step_before = metric.dist_sync_on_step
        self._uses_our_gather = metric.dist_sync_fn is None

    def change(self) -> None:
        """Let the metric gather its states from all processes."""
        # Processes have unequal numbers of batches, so a step must not wait for other processes.
        on_step = False
        if not self._uses_our_gather:
            self._configure(self._gather_before, self._available_before, on_step)
            return
        gather = partial(_gather_states, processes_per_batch=self._processes_per_batch)
        self._configure(gather, dist.is_initialized, on_step)
        # `Metric` has no setting for its method `sync`; an attribute of the object comes before the method.
        attributes = vars(self._metric)
        attributes["sync"] = partial(_fill_and_sync, self._metric)

    def restore(self) -> None:
        """Give the metric its former settings."""
        self._configure(self._gather_before, self._available_before, self._on_step_before)
        if self._uses_our_gather:
            attributes = vars(self._metric)
            attributes.pop("sync", None)

    def _configure(self, gather: Any, available: Any, on_step: bool) -> None:
        """Set the functions by which the metric gathers states and decides to do so, and whether it does in steps."""
        self._metric.dist_sync_fn = gather
        self._metric.distributed_available_fn = available
        self._metric.dist_sync_on_step = on_step


def _fill_and_sync(
    metric: Metric,
    *,
    should_sync: bool = True,
    **kwargs: Any,
) -> None:
    """Exchange the states of a metric, whose lists have the same length in all processes for that time.

    Torchmetrics exchanges lists entry by entry and none without an entry, so all processes need as many entries.
    `_gather_states` drops the empty tensors that fill the lists.
    """
    if should_sync and dist.is_initialized():
        _fill_lists(metric)
    # The method of the class, which the attribute of the object hides.
    kind = type(metric)
    kind.sync(metric, should_sync=should_sync, **kwargs)


def _fill_lists(metric: Metric) -> None:
    """Fill a metric's lists up to the length of the longest in any process, at least 1."""
    # 1. Find the lists. All processes have the same ones.
    lists = {}
    for name, state in metric.metric_state.items():
        if isinstance(state, list):
            lists[name] = state
    if not lists:
        return

    # 2. Exchange their lengths.
    lengths = {name: len(state) for name, state in lists.items()}
    lengths_by_rank = gather_objects(lengths)

    # 3. Fill them.
    for name, state in lists.items():
        longest = 1
        for lengths_of_rank in lengths_by_rank:
            longest = max(longest, lengths_of_rank[name])
        filled = _filled(state, longest, metric.device)
        setattr(metric, name, filled)


def _filled(
    state: list[Tensor],
    length: int,
    device: torch.device,
) -> list[Tensor]:
    """Return a list of this number of tensors: those of `state`, then empty ones of the same dtype."""
    if state:
        like = state[0]
    else:
        like = torch.zeros(0, device=device)
    empty = like.new_zeros(0)
    num_missing = length - len(state)
    return state + num_missing * [empty]


def _gather_states(state: Tensor, group: Any = None, *, processes_per_batch: int) -> list[Tensor]:
    """Return a metric's state in all processes, of any shapes; drop empty ones unless all are empty.

    A `process_group` of the user's metric, such as a column of a mesh, is taken as it is.
    """
    # Objects may have any shape, tensors in a collective may not.
    detached = state.detach()
    states = gather_objects(detached.cpu(), group)
    if len(states) == dist.get_world_size():
        states = states[::processes_per_batch]
    with_elements = [tensor for tensor in states if tensor.numel()]
    if not with_elements:
        with_elements = states[:1]
    return [tensor.to(state.device) for tensor in with_elements]
