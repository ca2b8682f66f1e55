"""Metrics that share states in a collection are saved, sent and merged with the states of the collection."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryAveragePrecision, BinaryF1Score

from equipoise.interop.merged_metrics import join_metrics, metrics_of, states_to_send
from equipoise.interop.metrics import load_metric_states, metric_states
from tests.support.pairs import pairwise
from tests.support.trainer_runs import Small, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore:No (positive|negative) samples in targets")

KINDS: dict[str, list[Any]] = {
    "numbers": [BinaryAccuracy, BinaryF1Score],
    "lists": [BinaryAUROC, BinaryAveragePrecision],
}
STATES = pytest.mark.parametrize("states", KINDS)
CALL = pytest.mark.parametrize("call", [False, True], ids=["update", "forward"])


def collection(states: str) -> MetricCollection:
    return MetricCollection([kind() for kind in KINDS[states]])


def samples(seed: int, count: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, generator=generator), torch.arange(count) % 2


def update(metrics: MetricCollection, call: bool, *seeds: int) -> MetricCollection:
    """Update a collection with a batch for each seed."""
    for seed in seeds:
        metrics(*samples(seed)) if call else metrics.update(*samples(seed))
    return metrics


def values_of(metrics: MetricCollection) -> Any:
    return pytest.approx({name: float(value) for name, value in metrics.compute().items()})


@STATES
@CALL
def test_a_checkpoint_holds_the_states_of_all_metrics(states: str, call: bool) -> None:
    module, other = nn.ModuleDict({"both": collection(states)}), nn.ModuleDict({"both": collection(states)})
    update(module["both"], call, 0, 1)
    saved = metric_states(module)
    assert {state["count"] for state in saved.values()} == {2}
    # One that is in use already; its own states are gone.
    update(other["both"], call, 7, 8)
    load_metric_states(other, saved)
    computed = [float(metric.compute()) for metric in metrics_of(other)]
    assert dict(zip(other["both"].keys(), computed, strict=True)) == values_of(update(collection(states), call, 0, 1))
    actual = {name: float(value) for name, value in update(other["both"], call, 2).compute().items()}
    assert actual == values_of(update(collection(states), call, 0, 1, 2))


@STATES
@CALL
def test_states_of_several_processes_are_joined(states: str, call: bool) -> None:
    """Also with one that was never updated, and so has not found out that states may be shared."""
    sent = [states_to_send(update(collection(states), call, *seeds)) for seeds in ([0, 2], [], [1])]
    joined = update(collection(states), call, 9)
    join_metrics(joined, sent)
    computed = [float(metric.compute()) for metric in metrics_of(joined)]
    assert dict(zip(joined.keys(), computed, strict=True)) == values_of(update(collection(states), call, 0, 1, 2))


@pytest.mark.parametrize(("strategy", "states", "call"), pairwise(["dp", "single_device"], list(KINDS), [False, True]))
def test_states_of_parts_of_a_batch_are_merged(strategy: str, states: str, call: bool) -> None:
    class Module(Small):
        def __init__(self) -> None:
            super().__init__()
            self.both = collection(states)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            update_with(self.both, batch[0][:, 0])
            return self.loss(batch)

        def on_train_epoch_end(self) -> None:
            self.seen = [float(metric.compute()) for metric in metrics_of(self.both)]

    def update_with(metrics: MetricCollection, numbers: Tensor) -> MetricCollection:
        arguments = torch.frac(numbers * 0.37), numbers.long() % 2
        metrics(*arguments) if call else metrics.update(*arguments)
        return metrics

    module = Module()
    devices: Any = ["cpu", "cpu"] if strategy == "dp" else 1
    run = trainer(strategy=strategy if strategy == "dp" else "auto", devices=devices)
    run.fit(module, loader(3, batch_size=4))
    expected = collection(states)
    for first in (0, 4, 8):
        update_with(expected, torch.arange(first, first + 4.0))
    assert dict(zip(expected.keys(), module.seen, strict=True)) == values_of(expected)
