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

# Attributes by which a metric gathers its states.
_SETTINGS = ("dist_sync_fn", "distributed_available_fn", "dist_sync_on_step")


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
    restores = [_share(metric, processes_per_batch) for metric in named_metrics(module).values()]

    def restore() -> None:
        for restore_metric in restores:
            restore_metric()

    return restore


def _share(metric: Metric, processes_per_batch: int) -> Callable[[], None]:
    """Let a metric gather its states from all processes; return a function that restores its settings."""
    attributes = vars(metric)
    settings = {name: attributes[name] for name in _SETTINGS}
    uses_our_gather = metric.dist_sync_fn is None
    # Processes have unequal numbers of batches, so a step must not wait for other processes.
    metric.dist_sync_on_step = False
    if uses_our_gather:
        metric.dist_sync_fn = partial(_gather_states, processes_per_batch=processes_per_batch)
        metric.distributed_available_fn = dist.is_initialized
        # `Metric` has no setting for its method `sync`; an attribute of the object comes before the method.
        attributes["sync"] = partial(_fill_and_sync, metric)

    def restore() -> None:
        attributes.update(settings)
        if uses_our_gather:
            attributes.pop("sync", None)

    return restore


def _fill_and_sync(metric: Metric, *, should_sync: bool = True, **kwargs: Any) -> None:
    """Exchange the states of a metric, whose lists have the same length in all processes for that time.

    Torchmetrics exchanges lists entry by entry and none without an entry, so all processes need as many entries.
    `_gather_states` drops the empty tensors that fill the lists.
    """
    if should_sync and dist.is_initialized():
        _fill_lists(metric)
    # The method of the class, which the attribute of the object hides.
    type(metric).sync(metric, should_sync=should_sync, **kwargs)


def _fill_lists(metric: Metric) -> None:
    """Fill a metric's lists up to the length of the longest in any process, at least 1."""
    # All processes have the same lists.
    lists = {name: state for name, state in metric.metric_state.items() if isinstance(state, list)}
    if not lists:
        return
    lengths_by_rank = gather_objects({name: len(state) for name, state in lists.items()})
    for name, state in lists.items():
        longest = max(1, *(lengths[name] for lengths in lengths_by_rank))
        like = state[0] if state else torch.zeros(0, device=metric.device)
        missing = longest - len(state)
        setattr(metric, name, state + missing * [like.new_zeros(0)])


def _gather_states(state: Tensor, group: Any = None, *, processes_per_batch: int) -> list[Tensor]:
    """Return a metric's state in all processes, of any shapes; drop empty ones unless all are empty.

    A `process_group` of the user's metric, such as a column of a mesh, is taken as it is.
    """
    # Objects may have any shape, tensors in a collective may not.
    states = gather_objects(state.detach().cpu(), group)
    if len(states) == dist.get_world_size():
        states = states[::processes_per_batch]
    with_elements = [tensor for tensor in states if tensor.numel()]
    if not with_elements:
        with_elements = states[:1]
    return [tensor.to(state.device) for tensor in with_elements]
