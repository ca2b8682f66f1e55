"""Reduce logged values over all processes, also if some of them logged nothing.

One exchange reports to every process what all of them have logged. So a process that had no batch knows the names, and
no process waits for a value that another never logged.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from equipoise.interop.lightning.self_log import LogOptions
from equipoise.interop.module_metrics import named_metrics
from equipoise.trainer.logging.collection import Collection
from equipoise.trainer.logging.entry import Entry, combined, neutral_value

__all__ = ["LogReduction", "merge_saved_entries"]

# The result of `Entry.state_dict`.
EntryState = dict[str, Any]


@dataclass(frozen=True)
class LogReduction:
    """Reduction of logged values over the processes of a run.

    Attributes:
        gather: Return the objects that all processes pass to it, by rank.
        module: The user's module, whose metrics are identified by their names.
        device: Device of the reduced values.
    """

    gather: Callable[[Any], list[Any]]
    module: nn.Module
    device: torch.device

    def reduce_epoch_values(self, collection: Collection, dataloader_idx: int | None) -> None:
        """Compute the epoch's values of all that any process has logged, and that are not computed yet.

        Args:
            collection: The values that this process has logged. Entries of other processes are added.
            dataloader_idx: The loader whose values are reduced; None if there is one loader.
        """
        # 1. Report the entries of this process to all, and receive theirs.
        gathered = self.gather(self._reports_of(collection, dataloader_idx))
        reports_by_key = _by_key(gathered)
        # 2. Compute each value. The order is the same in all processes, which metrics need.
        for key, reports in reports_by_key.items():
            entry = collection.entries.get(key)
            if entry is None:
                entry = Entry.like(reports[0], named_metrics(self.module))
                collection.add(entry)
            entry.set_epoch_value(self._epoch_value(entry, reports))
            step = reports[0]["step"]
            if entry.options.rank_zero_only and entry.step is None and step is not None:
                entry.step = step.to(self.device)

    def sync_step_values(self, collection: Collection) -> None:
        """Reduce the values of a step that were logged with `sync_dist=True`, over the processes that logged them."""
        # 1. Exchange the values of this step.
        entries = {}
        values_here = {}
        for key, entry in collection.entries.items():
            if not entry.syncs_steps or not entry.live:
                continue
            entries[key] = entry
            value = entry.step
            if value is not None:
                values_here[key] = value.detach().cpu()
        values_of_processes = self.gather(values_here)
        # 2. Combine those of each entry. A process without a batch has none.
        for key, entry in entries.items():
            values = [
                values_of_process[key].to(self.device)
                for values_of_process in values_of_processes
                if key in values_of_process
            ]
            if values:
                entry.step = combined(values, entry.options.reduce_fx)

    def _reports_of(self, collection: Collection, dataloader_idx: int | None) -> list[EntryState]:
        """Return the states of the entries that other processes must know."""
        entries = []
        for entry in collection.entries.values():
            if not entry.live or entry.dataloader_idx != dataloader_idx:
                continue
            is_unknown = entry.options.on_epoch and entry.computed is None
            if is_unknown or entry.options.rank_zero_only:
                entries.append(entry)
        names_of_metrics = {}
        has_metrics = any(entry.metric is not None for entry in entries)
        # The search goes through the whole module.
        if has_metrics:
            names_of_metrics = {id(metric): name for name, metric in named_metrics(self.module).items()}
        return [entry.state_dict(names_of_metrics) for entry in entries]

    def _epoch_value(self, entry: Entry, reports: list[EntryState]) -> Any:
        """Return the value over all processes; None if it is that of this process alone."""
        if entry.metric is not None:
            with warnings.catch_warnings():
                # A process without a batch has updated no metric.
                warnings.filterwarnings("ignore", message=".*was called before the ``update`` method")
                return entry.metric.compute()
        # Callbacks of a process that has not logged it decide by the value of the one that has.
        if entry.options.rank_zero_only and entry.total is not None:
            return None
        merged = _merged_entry(reports)
        value = merged["total"]
        if value is None:
            return None
        if entry.is_mean:
            value = value / merged["weight"]
        return value.to(self.device)


def _by_key(gathered: list[list[EntryState]]) -> dict[Any, list[EntryState]]:
    """Return what each process has reported of an entry, by the key of the entry."""
    reports_by_key: dict[Any, list[EntryState]] = {}
    for reports_of_process in gathered:
        for report in reports_of_process:
            reports_by_key.setdefault(tuple(report["key"]), []).append(report)
    return reports_by_key


def merge_saved_entries(entries_of_processes: list[list[EntryState]], rank: int) -> list[EntryState]:
    """Merge the saved entries of several processes, for another number of processes.

    Rank 0 gets the values of all of them. The other ranks get the same entries without values, since values of an epoch
    are reduced entry by entry.

    Args:
        entries_of_processes: For each process, the results of `Entry.state_dict`, in the order of ranks.
        rank: The rank of the process that continues.
    """
    # 1. The entries of each key, by rank.
    states_by_key: dict[Any, dict[int, EntryState]] = {}
    for rank_before, states in enumerate(entries_of_processes):
        for state in states:
            states_by_key.setdefault(tuple(state["key"]), {})[rank_before] = state

    # 2. Merge them.
    merged = []
    for states_of_key in states_by_key.values():
        states = list(states_of_key.values())
        entry = _merged_entry(states)
        options = LogOptions(*entry["options"])
        if rank == 0:
            merged.append(entry)
        elif not options.rank_zero_only:
            state_of_rank = states_of_key.get(rank, {})
            empty_entry = _without_values(entry)
            empty_entry["step"] = state_of_rank.get("step")
            merged.append(empty_entry)
    return merged


def _merged_entry(states: list[EntryState]) -> EntryState:
    """Return one entry for those that several processes have of a key."""
    first = states[0]
    options = LogOptions(*first["options"])
    totals = [state["total"] for state in states if state["total"] is not None]
    # The value of rank 0 alone counts.
    if options.rank_zero_only or not totals:
        return first
    reduction = options.reduce_fx
    if reduction == "mean":
        # The total of a mean is a sum of weighted values.
        reduction = "sum"
    # Precisions of processes may differ if only some of them logged in a hook of another precision.
    dtype = totals[0].dtype
    totals = [total.to(dtype) for total in totals]
    total = combined(totals, reduction)
    return {**first, "total": total, "weight": sum(state["weight"] for state in states)}


def _without_values(entry: EntryState) -> EntryState:
    """Return a saved entry whose values change nothing in a reduction."""
    total = entry["total"]
    if total is not None:
        reduction = LogOptions(*entry["options"]).reduce_fx
        total = torch.full_like(total, neutral_value(reduction))
    return {**entry, "total": total, "weight": 0}
