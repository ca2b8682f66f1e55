"""Metrics that both training and validation log: each of the two has its own value."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torchmetrics import Metric

from equipoise.interop.merged_metrics import metrics_of
from equipoise.interop.metrics import link_collections, restore_metric_state, take_metric_state
from equipoise.interop.module_metrics import named_metrics
from equipoise.notices import rank_zero_warn
from equipoise.trainer.logging.collection import Collection

__all__ = ["separated_metrics"]


@contextmanager
def separated_metrics(
    module: nn.Module, training: Collection, validation: Collection, earlier_names: frozenset[str]
) -> Iterator[None]:
    """Empty shared metrics for a validation, and restore them for the training.

    Which metrics a validation logs is known from an earlier one, such as the sanity check. Without one a warning says
    that values were mixed.

    Args:
        module: The user's module.
        training: Values that the training has logged.
        validation: Values that validations have logged.
        earlier_names: Names of the metrics that the validation of an earlier process has logged.
    """
    shared = _shared(module, training, validation, earlier_names)
    states = []
    if shared:
        link_collections(module)
        single = {id(metric): metric for entry in shared.values() for metric in metrics_of(entry)}
        states = [(metric, take_metric_state(metric)) for metric in single.values()]
    yield
    mixed = sorted(_shared(module, training, validation, earlier_names).keys() - shared.keys())
    if mixed:
        rank_zero_warn(
            f"Training and validation log the same metric, here as {mixed[0]!r}: its values of this epoch are mixed,"
            " and the end of the validation has emptied it. Give each a metric of its own, or run a sanity check, which"
            " shows it in time."
        )
    for metric, state in states:
        restore_metric_state(metric, state)


def _shared(
    module: nn.Module, training: Collection, validation: Collection, earlier_names: frozenset[str]
) -> dict[str, Metric]:
    """Return the metrics that training has logged in this epoch, and a validation, too; by the names of values."""
    trained = {
        entry.name: entry.metric for entry in training.entries.values() if entry.live and entry.metric is not None
    }
    if not trained:
        return {}
    validated = {id(entry.metric) for entry in validation.entries.values()}
    if earlier_names:
        metrics = named_metrics(module)
        validated.update(id(metrics.get(name)) for name in earlier_names)
    return {name: metric for name, metric in trained.items() if id(metric) in validated}
