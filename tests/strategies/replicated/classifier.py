"""A classifier that logs in every way, and its fits with replicas in one process."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from equipoise import BalancedDataParallelStrategy, DataParallelStrategy, Strategy, Trainer
from tests.support.equality import assert_equal
from tests.support.pipelines import quiet

__all__ = [
    "CLASSES",
    "STRATEGIES",
    "Module",
    "Seen",
    "assert_trains_alike",
    "fitted",
    "in_forward",
    "loader",
    "trainer",
]

CLASSES = 3
ONE_DEVICE: tuple[Any, int] = ("single_device", 1)


def loader(*sizes: int) -> DataLoader[Any]:
    """Batches of features and labels, in float64."""
    draw = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(size, 4, dtype=torch.float64, generator=draw), torch.randint(CLASSES, (size,), generator=draw))
        for size in sizes or (7, 7, 5, 2)
    ]
    return DataLoader(batches, batch_size=None)


class Module(L.LightningModule):
    """Logs in every way, and returns more than the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, CLASSES))
        self.accuracy = MulticlassAccuracy(CLASSES)
        scores = {"f1": MulticlassF1Score(CLASSES), "accuracy": MulticlassAccuracy(CLASSES, average="micro")}
        self.scores = MetricCollection(scores, prefix="val_")
        self.mean = MeanMetric()

    def forward(self, features: Tensor) -> Tensor:
        return self.net(features)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, labels = batch
        logits = self(features)
        loss = nn.functional.cross_entropy(logits, labels)
        self.accuracy(logits, labels)
        self.mean.update(features[:, 0])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("largest", features.max(), reduce_fx="max", on_epoch=True)
        self.log("seen", float(len(features)), reduce_fx="sum", on_epoch=True)
        self.log("sized", labels.double().mean(), batch_size=len(labels), on_epoch=True)
        return {"loss": loss, "logits": logits, "correct": (logits.argmax(1) == labels).sum(), "note": "same"}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.scores.update(logits, batch[1])
        self.log_dict(self.scores)
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]))
        return logits

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Seen(L.Callback):
    """Keeps what callbacks are shown of every training batch, and the outputs of validation."""

    def __init__(self) -> None:
        self.batches: list[tuple[Any, dict[str, float]]] = []
        self.validated: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append((outputs, {name: float(value) for name, value in trainer.callback_metrics.items()}))

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        self.validated.append(outputs)


def trainer(strategy: Strategy | str = "single_device", devices: int = 1, **options: Any) -> Trainer:
    run = {"max_epochs": 2, "num_sanity_val_steps": 0, **options}
    return quiet(strategy=strategy, devices=["cpu"] * devices, **run)


def fitted(
    make: type[Any],
    of: tuple[Any, int] = ONE_DEVICE,
    sizes: tuple[int, ...] = (),
    *,
    validates: bool = False,
    **options: Any,
) -> Any:
    """Return a module that a strategy has trained on its devices, from the same weights each time."""
    torch.manual_seed(3)
    module = make()
    trainer(*of, **({} if validates else {"limit_val_batches": 0}), **options).fit(module, loader(*sizes), loader())
    return module


def assert_trains_alike(make: type[Any], of: tuple[Any, int], one_device: tuple[Any, int] = ONE_DEVICE) -> None:
    """See that a fit ends as that of one device."""
    sizes = (7, 7, 5, 5)
    expected, actual = fitted(make, one_device, sizes), fitted(make, of, sizes)
    assert_equal(dict(expected.state_dict()), dict(actual.state_dict()), 1e-12, ignore=["mean."])


def in_forward(devices: int = 3, **options: Any) -> tuple[Strategy, int]:
    """The strategy whose replicas compute the forward alone."""
    return DataParallelStrategy(parallelize="forward", **options), devices


STRATEGIES: dict[str, Any] = {
    "dp": lambda: (DataParallelStrategy(), 3),
    "more devices than samples": lambda: (DataParallelStrategy(), 9),
    "forward": in_forward,
    "balanced": lambda: (BalancedDataParallelStrategy(shares=[1, 3]), 2),
    "first device left out": lambda: (BalancedDataParallelStrategy(shares=[0, 1, 2]), 3),
    "first device": lambda: (BalancedDataParallelStrategy(first_device_batch_size=1), 3),
}
