"""Metrics that both training and validation log: each of the two has its own value."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torchmetrics import Metric

from equipoise.interop.metrics import link_collections, metrics_of, restore_metric_state, take_metric_state
from equipoise.interop.module_metrics import named_metrics
from equipoise.notices import rank_zero_warn
from equipoise.trainer.logging.collection import Collection
from equipoise.trainer.loops.fit_state import FitState

__all__ = ["separated_metrics"]


@contextmanager
def separated_metrics(module: nn.Module, fit: FitState, validation: Collection) -> Iterator[None]:
    """Empty shared metrics for a validation, and let the training go on with them as they were.

    Which metrics a validation logs is known from an earlier one, such as the sanity check. Without one a warning says
    that values were mixed.

    Args:
        module: The user's module.
        fit: The state of training, and what it has logged.
        validation: What validations have logged.
    """
    shared = _shared(module, fit, validation)
    states = []
    if shared:
        link_collections(module)
        parts = {id(part): part for metric in shared.values() for part in metrics_of(metric)}
        states = [(part, take_metric_state(part)) for part in parts.values()]
    yield
    mixed = sorted(_shared(module, fit, validation).keys() - shared.keys())
    if mixed:
        rank_zero_warn(
            f"Training and validation log the same metric, here as {mixed[0]!r}: its values of this epoch are mixed,"
            " and the end of the validation has emptied it. Give each a metric of its own, or run a sanity check, which"
            " shows it in time."
        )
    for part, state in states:
        restore_metric_state(part, state)


def _shared(module: nn.Module, fit: FitState, validation: Collection) -> dict[str, Metric]:
    """Return the metrics that training has logged in this epoch, and a validation, too; by the names of values."""
    trained = {}
    for entry in fit.collection.entries.values():
        if entry.live and entry.metric is not None:
            trained[entry.name] = entry.metric
    if not trained:
        return {}
    validated = {id(entry.metric) for entry in validation.entries.values()}
    if fit.validated_metrics:
        metrics = named_metrics(module)
        validated.update(id(metrics.get(name)) for name in fit.validated_metrics)
    return {name: metric for name, metric in trained.items() if id(metric) in validated}
