"""Reduce logged values over all processes, also where some of them logged nothing.

One exchange tells every process what all of them have logged. So a process that had no batch knows the names, and
nobody waits for a value that another never logged.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torchmetrics import Metric

from equipoise.interop.lightning.self_log import LogOptions
from equipoise.trainer.logging.entry import Collection, Entry

__all__ = ["reduce_epoch_values", "sync_step_values"]


def reduce_epoch_values(
    collection: Collection,
    dataloader_idx: int | None,
    gather: Callable[[Any], list[Any]],
    module: nn.Module,
    device: torch.device,
) -> None:
    """Computes the epoch's values of all that any process has logged.

    Args:
        collection: What this one has logged; what others have is added.
        dataloader_idx: The loader in question, where there are several.
        gather: Returns what all processes pass to it.
        module: The user's module, whose metrics are known by name.
        device: Where values are wanted.
    """
    names = {id(part): name for name, part in module.named_modules() if isinstance(part, Metric)}
    own = [
        _described(entry, names)
        for entry in collection.entries.values()
        if entry.live and entry.options.on_epoch and entry.dataloader_idx == dataloader_idx
    ]
    of_all: dict[Any, list[dict[str, Any]]] = {}
    for told in gather(own):
        for each in told:
            of_all.setdefault(each["key"], []).append(each)
    metrics = dict(module.named_modules())
    for key, told in of_all.items():
        entry = collection.entries.get(key)
        if entry is None:
            entry = collection.entries[key] = _made(told[0], metrics)
        entry.live = True
        if entry.metric is not None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*was called before the ``update`` method")
                entry.computed = entry.metric.compute()
        elif not entry.options.rank_zero_only:
            entry.computed = _merged(entry, told, device)


def sync_step_values(collection: Collection, gather: Callable[[Any], list[Any]], device: torch.device) -> None:
    """Reduces the values of a step that were logged with `sync_dist=True`, over the processes that logged them.

    Args:
        collection: What this one has logged.
        gather: Returns what all processes pass to it.
        device: Where values are wanted.
    """
    syncs = {key: entry for key, entry in collection.entries.items() if entry.syncs and entry.live}
    told = gather({key: entry.step.detach().cpu() for key, entry in syncs.items() if entry.step is not None})
    for key, entry in syncs.items():
        if values := [each[key].to(device) for each in told if key in each]:
            entry.step = _combined(torch.stack(values), entry.options.reduce_fx)


def _described(entry: Entry, names: dict[int, str]) -> dict[str, Any]:
    if entry.metric is not None and id(entry.metric) not in names:
        raise MisconfigurationException(
            f"The metric logged as {entry.name!r} is no attribute of the module, so other processes cannot know it."
            " Make it one."
        )
    return {
        "key": entry.key,
        "options": tuple(entry.options),
        "dataloader_idx": entry.dataloader_idx,
        "metric": None if entry.metric is None else names[id(entry.metric)],
        "total": None if entry.total is None else entry.total.detach().cpu(),
        "weight": entry.weight,
    }


def _made(told: dict[str, Any], modules: dict[str, nn.Module]) -> Entry:
    """An entry for what others have logged."""
    hook, name, _ = told["key"]
    metric: Any = None if told["metric"] is None else modules[told["metric"]]
    entry = Entry(hook, name, LogOptions(*told["options"]), told["dataloader_idx"], metric)
    entry.given = tuple(entry.options)
    return entry


def _merged(entry: Entry, told: list[dict[str, Any]], device: torch.device) -> Tensor | None:
    totals = [each["total"].to(device) for each in told if each["total"] is not None]
    if not totals:
        return None
    stacked = torch.stack([total.to(totals[0].dtype) for total in totals])
    if entry.weighs:
        mean: Tensor = stacked.sum(0) / sum(each["weight"] for each in told)
        return mean
    return _combined(stacked, entry.options.reduce_fx)


def _combined(values: Tensor, reduction: str) -> Tensor:
    if reduction == "mean":
        return values.mean(0)
    return values.sum(0) if reduction == "sum" else values.amin(0) if reduction == "min" else values.amax(0)
