"""Snapshot of the states of metrics."""

from torch import Tensor, nn
from torchmetrics import Metric

from equipoise.interop.metrics import MetricState, restore_metric_state, take_metric_state
from equipoise.interop.module_metrics import named_metrics

__all__ = ["Metrics"]


class Metrics:
    """Notes the states of a module's metrics, and restores them.

    Args:
        module: The module; its submodules count, too.
    """

    def __init__(self, module: nn.Module) -> None:
        self._metrics = list(named_metrics(module).values())
        self._states: list[MetricState] = []

    def mark(self) -> None:
        """Note the present states."""
        if self._metrics:
            self._states = [_state_of(metric) for metric in self._metrics]

    def restore(self) -> None:
        """Restore the states at the last mark. They are copied again, since they may be restored once more."""
        metrics = zip(self._metrics, self._states, strict=True)
        for metric, state in metrics:
            restore_metric_state(metric, _copied(state))


def _state_of(metric: Metric) -> MetricState:
    state = take_metric_state(metric)
    restore_metric_state(metric, state)
    return _copied(state)


def _copied(state: MetricState) -> MetricState:
    """Return the state with copies of tensors and lists, since updates change them in place."""
    copies: MetricState = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            copies[name] = value.detach().clone()
        elif isinstance(value, list):
            copies[name] = list(value)
        else:
            copies[name] = value
    return copies
