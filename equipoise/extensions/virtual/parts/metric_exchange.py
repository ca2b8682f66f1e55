"""Metrics of a module in all processes: each holds the states of all parts, added in their order."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchmetrics import Metric

from equipoise.errors import StepError
from equipoise.extensions.virtual.parts.part_modules import PartModules
from equipoise.interop.merged_metrics import merge_metric_states
from equipoise.interop.metrics import (
    MetricCopy,
    MetricState,
    link_collections,
    other_state,
    restore_metric_state,
    state_on_cpu,
    take_metric_state,
)
from equipoise.interop.module_metrics import named_metrics

__all__ = ["MetricExchange"]


@dataclass(frozen=True)
class _MetricName:
    """Stands for a metric in a logged value that other processes receive.

    Attributes:
        name: The name of the metric in the module.
    """

    name: str


class MetricExchange:
    """Takes the states of a module's metrics apart, and merges those of the parts of all processes.

    Args:
        module: The user's module.
        modules: The module on each device of this process.
    """

    def __init__(self, module: nn.Module, modules: PartModules) -> None:
        self._modules = modules
        self._by_name = named_metrics(module)
        self._metrics = list(self._by_name.values())
        self._names = {id(metric): name for name, metric in self._by_name.items()}
        # All processes hold the whole states, so torchmetrics must not add them up when it computes.
        self._available_before = [metric.distributed_available_fn for metric in self._metrics]
        for metric in self._metrics:
            metric.distributed_available_fn = _never
        self._before: list[MetricState] = []
        # Counts that the metrics keep beside their states.
        self._counts: list[dict[str, Any]] = []

    def close(self) -> None:
        """Let torchmetrics exchange states as before."""
        for metric, available in zip(self._metrics, self._available_before, strict=True):
            metric.distributed_available_fn = available

    def begin(self) -> None:
        """Put the states aside; the metrics are as new."""
        self._counts = [other_state(metric) for metric in self._metrics]
        self._before = [take_metric_state(metric) for metric in self._metrics]

    def take(self, place: int = 0) -> list[MetricState]:
        """Return the states since `begin` or the last `take`, on the CPU; the metrics are as new.

        Args:
            place: Index of the device whose metrics were updated. Default: the first.

        Raises:
            StepError: If a metric counts beside its states, which other processes cannot know.
        """
        if not self._metrics:
            return []
        metrics = self._modules.metrics_of(place, self._metrics)
        for metric, before in zip(metrics, self._counts, strict=True):
            present = other_state(metric)
            changed = [name for name in present if present[name] != before.get(name)]
            if changed:
                raise StepError(
                    f"{type(metric).__name__} keeps {changed[0]!r} beside its states, and strategy='virtual' merges"
                    " states alone. Register it by `add_state`, with a reduction."
                )
        link_collections(self._modules.module_of(place))
        return [state_on_cpu(take_metric_state(metric)) for metric in metrics]

    def restore(self) -> None:
        """Give the metrics the states that `begin` has put aside."""
        for metric, state in zip(self._metrics, self._before, strict=True):
            restore_metric_state(metric, state)

    def merge(self, parts: Sequence[list[MetricState]], weights: Sequence[Any]) -> None:
        """Add the states of parts, in their order, to those that `begin` has put aside.

        Args:
            parts: The states that `take` returned for each part, in any process.
            weights: The weight of each part in a mean.
        """
        if not self._metrics or not parts:
            self.restore()
            return
        copies = [[MetricCopy(states[index]) for states in parts] for index in range(len(self._metrics))]
        merge_metric_states(self._metrics, self._before, copies, list(weights))

    # Logged metrics

    def named(self, logged: Iterable[Any]) -> list[Any]:
        """Return logged values with names in the place of metrics, which other processes can find.

        Raises:
            StepError: If a metric was created in a step.
        """
        return [entry._replace(value=self._named(entry)) for entry in logged]

    def _named(self, logged: Any) -> Any:
        if not isinstance(logged.value, Metric):
            return logged.value
        name = self._names.get(id(self._modules.original(logged.value)))
        if name is None:
            raise StepError(
                f"The metric logged as {logged.name!r} was created in a step, so the states of the parts cannot be put"
                " together. Create it in the constructor or in `setup`."
            )
        return _MetricName(name)

    def found(self, logged: Iterable[Any]) -> list[Any]:
        """Return logged values with metrics in the place of names."""
        entries = []
        for entry in logged:
            value = entry.value
            if isinstance(value, _MetricName):
                value = self._by_name[value.name]
            entries.append(entry._replace(value=value))
        return entries


def _never() -> bool:
    return False
