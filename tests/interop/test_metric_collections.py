"""Metrics that share states in a collection are saved, sent and merged with the states of the collection."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryAveragePrecision, BinaryF1Score

from equipoise.interop.merged_metrics import join_metrics, metrics_of, states_to_send
from equipoise.interop.metrics import load_metric_states, metric_states
from tests.support.trainer_runs import Small, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore:No (positive|negative) samples in targets")

KINDS: dict[str, list[Any]] = {
    "numbers": [BinaryAccuracy, BinaryF1Score],
    "lists": [BinaryAUROC, BinaryAveragePrecision],
}
# The second argument tells whether metrics are called, or updated alone.
STATES = pytest.mark.parametrize(("states", "call"), [("numbers", False), ("numbers", True), ("lists", True)])
# Samples are numbers, from which scores and labels are computed.
FIRST, SECOND, THIRD, OTHER = torch.arange(48.0).split(12)


def collection(states: str) -> MetricCollection:
    return MetricCollection([kind() for kind in KINDS[states]])


def update(metrics: MetricCollection, call: bool, *batches: Tensor) -> MetricCollection:
    for numbers in batches:
        scores, labels = torch.frac(numbers * 0.37), numbers.long() % 2
        metrics(scores, labels) if call else metrics.update(scores, labels)
    return metrics


def values_of(metrics: MetricCollection) -> Any:
    return pytest.approx([float(value) for value in metrics.compute().values()])


def computed_alone(metrics: MetricCollection) -> list[float]:
    """The values that the metrics of a collection compute from states of their own."""
    return [float(metric.compute()) for metric in metrics_of(metrics)]


@STATES
def test_a_checkpoint_holds_the_states_of_all_metrics(states: str, call: bool) -> None:
    module, other = nn.ModuleDict({"both": collection(states)}), nn.ModuleDict({"both": collection(states)})
    update(module["both"], call, FIRST, SECOND)
    saved = metric_states(module)
    assert {state["count"] for state in saved.values()} == {2}

    # One that is in use already; its own states are gone.
    update(other["both"], call, OTHER, OTHER)
    load_metric_states(other, saved)
    assert computed_alone(other["both"]) == values_of(update(collection(states), call, FIRST, SECOND))
    actual = [float(value) for value in update(other["both"], call, THIRD).compute().values()]
    assert actual == values_of(update(collection(states), call, FIRST, SECOND, THIRD))


@STATES
def test_states_of_several_processes_are_joined(states: str, call: bool) -> None:
    """Also with one that was never updated, and so has not found out that states may be shared."""
    of_processes = ([FIRST, THIRD], [], [SECOND])
    sent = [states_to_send(update(collection(states), call, *batches)) for batches in of_processes]
    joined = update(collection(states), call, OTHER)
    join_metrics(joined, sent)
    assert computed_alone(joined) == values_of(update(collection(states), call, FIRST, SECOND, THIRD))


@pytest.mark.parametrize(("devices", "states", "call"), [(1, "lists", True), (2, "numbers", True), (2, "lists", False)])
def test_states_of_parts_of_a_batch_are_merged(devices: int, states: str, call: bool) -> None:
    class Module(Small):
        def __init__(self) -> None:
            super().__init__()
            self.both = collection(states)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            update(self.both, call, batch[0][:, 0])
            return self.loss(batch)

        def on_train_epoch_end(self) -> None:
            self.seen = computed_alone(self.both)

    module = Module()
    strategy = "dp" if devices == 2 else "single_device"
    trainer(strategy=strategy, devices=["cpu"] * devices).fit(module, loader(3, batch_size=4))
    assert module.seen == values_of(update(collection(states), call, *FIRST.split(4)))
