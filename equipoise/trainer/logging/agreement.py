"""Check that processes with one state have logged the same values."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from equipoise.errors import StepError
from equipoise.interop.module_metrics import named_metrics
from equipoise.trainer.logging.collection import Collection
from equipoise.trainer.logging.entry import Entry

__all__ = ["LogAgreement"]

# If hooks give the batches of processes different weights, means of equal values differ by rounding.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class LogAgreement:
    """Agreement on logged values, for processes with `has_one_state`. It has the methods of a `LogReduction`.

    Steps log the same in all processes. What hooks log may follow from the batches of one process; that is refused.

    Attributes:
        gather: Return the objects that all processes pass to it, by rank.
        module: The user's module, whose metrics are identified by their names.
    """

    gather: Callable[[Any], list[Any]]
    module: nn.Module

    def reduce_epoch_values(self, collection: Collection, dataloader_idx: int | None) -> None:
        """Check the values of the epoch, and give all processes those of the first one that has logged them.

        Nothing is reduced: the values are the same, or what rank 0 alone logs.

        Args:
            collection: The values that this process has logged.
            dataloader_idx: The loader whose values are checked; None if there is one loader.

        Raises:
            StepError: In all processes, if values differ.
        """
        # 1. Exchange the values. To find the metrics, the whole module is searched.
        of_loader = [entry for entry in collection.entries.values() if entry.dataloader_idx == dataloader_idx]
        live = [entry for entry in of_loader if entry.live]
        names: dict[int, str] = {}
        if any(entry.metric is not None for entry in live):
            names = {id(metric): name for name, metric in named_metrics(self.module).items()}
        states_of_processes = self.gather({entry.key: entry.state_dict(names) for entry in live})

        # 2. Check each name that any process has logged, in the order of the first process that has it.
        keys: dict[Any, None] = {}
        for states_of_process in states_of_processes:
            keys.update(dict.fromkeys(states_of_process))
        for key in keys:
            states = [states_of_process.get(key) for states_of_process in states_of_processes]
            present = next(state for state in states if state is not None)
            entry = collection.entries.get(key)
            if entry is None:
                entry = Entry.like(present, named_metrics(self.module))
            # What rank 0 alone logs has nothing to agree with.
            if entry.options.on_epoch and not entry.options.rank_zero_only:
                _check_agrees(entry, states)

            # 3. Take the values. A metric synchronises its states by itself.
            collection.add(entry)
            if entry.metric is None:
                entry.load_values(present)

    def sync_step_values(self, collection: Collection) -> None:
        """Do nothing: loggers write in rank 0, whose hooks receive what those of one process do."""


def _check_agrees(entry: Entry, states: list[Any]) -> None:
    """Compare the values of a name in all processes."""
    hook, name, _ = entry.key
    first = states[0]
    for state in states:
        if state is None or first is None:
            raise _differs(name, hook)
        if entry.metric is None and not _are_equal(first, state, entry.is_mean):
            raise _differs(name, hook)


def _are_equal(one: dict[str, Any], other: dict[str, Any], is_mean: bool) -> bool:
    total = _number(one["total"])
    other_total = _number(other["total"])
    if not is_mean or one["weight"] == other["weight"]:
        # By their bits: two NaNs are equal, and 0.0 differs from -0.0.
        return repr(total) == repr(other_total)
    mean = total / one["weight"]
    other_mean = other_total / other["weight"]
    return math.isclose(mean, other_mean, rel_tol=_ROUNDING) or (math.isnan(mean) and math.isnan(other_mean))


def _number(value: Any) -> Any:
    if value is None:
        return None
    return value.item()


def _differs(name: str, hook: str) -> StepError:
    return StepError(
        f"`{hook}` logs {name!r} with another value in each process, or not in all of them: it depends on the batches"
        " of one process. Log it in the step, or update a torchmetrics Metric there; pass batch_size= if only the"
        " weights differ."
    )
