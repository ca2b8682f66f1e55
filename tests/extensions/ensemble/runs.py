"""A module that saves its hyperparameters, and the runs that an ensemble is compared with."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from equipoise import EnsembleStrategy, Trainer
from tests.support.equality import assert_equal
from tests.support.quiet import QUIET

__all__ = [
    "CLASSES",
    "CLOSE",
    "Classifier",
    "OfAnyLoaders",
    "SavesAt",
    "alone",
    "assert_members",
    "ensemble",
    "loader",
    "states_alone",
    "trainer",
]

CLASSES = 3
# What is said of the numbers of members that are computed at once. One by one they are the same to the bit.
CLOSE = 1e-10


class Classifier(L.LightningModule):
    """A small network, and the optimiser and layers that a test asks for.

    Attributes:
        network: Makes another network, (batch, 8) → (batch, 3), for a class below.
    """

    network: ClassVar[Any] = None

    def __init__(self, optimizer: str = "adam", dropout: float = 0.0, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.optimizer_name = optimizer
        middle = [nn.Dropout(dropout)] if dropout else []
        self.net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), *middle, nn.Linear(width, CLASSES)).double()
        if self.network is not None:
            self.net = self.network()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def forward(self, features: Tensor) -> Tensor:
        return self.net(features)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy)
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]), prog_bar=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"p": self(batch[0]).softmax(-1), "label": batch[1]}

    def configure_optimizers(self) -> Any:
        if self.optimizer_name == "adam":
            return torch.optim.Adam(self.parameters(), lr=0.01)
        if self.optimizer_name == "adafactor":
            return torch.optim.Adafactor(self.parameters(), lr=0.01)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class OfAnyLoaders(Classifier):
    """Draws random numbers in its steps, and adds the losses of the batches of its loaders, one or two."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batches = batch.values() if isinstance(batch, dict) else [batch]
        return sum(nn.functional.cross_entropy(self.net(features), labels) for features, labels in batches)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        super().validation_step((batch[0] + torch.randn_like(batch[0]), batch[1]), batch_idx)


class SavesAt(L.Callback):
    """Saves a checkpoint after a number of batches."""

    def __init__(self, batches: int, path: Path) -> None:
        self.batches, self.path = batches, path

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batches:
            trainer.save_checkpoint(self.path)


def loader(samples: int = 43, *, shuffle: bool = True, **options: Any) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(7)
    features = torch.randn(samples, 8, dtype=torch.float64, generator=draw)
    labels = torch.randint(CLASSES, (samples,), generator=draw)
    return DataLoader(TensorDataset(features, labels), **{"batch_size": 6, "shuffle": shuffle, **options})


def trainer(strategy: Any = "single_device", **options: Any) -> Trainer:
    return Trainer(strategy=strategy, devices=["cpu"], **{**QUIET, "max_epochs": 2, **options})


_in_order = partial(loader, shuffle=False)


def alone(
    seed: int, module: Any = Classifier, data: Any = loader, validation: Any = _in_order, **options: Any
) -> tuple[Any, Trainer]:
    """A run of its own: what a member is to be equal to."""
    seed_everything(seed, verbose=False)
    model, run = module(), trainer(**options)
    run.fit(model, data(), validation())
    return model, run


def ensemble(
    seed: int,
    module: Any = Classifier,
    data: Any = loader,
    members: int = 3,
    mode: Any = "together",
    validation: Any = _in_order,
    **options: Any,
) -> tuple[EnsembleStrategy, Trainer, Any]:
    """The same as an ensemble, whose members have this seed and the next ones."""
    seed_everything(seed, verbose=False)
    strategy = EnsembleStrategy(members=members, mode=mode)
    model, run = module(), trainer(strategy, **options)
    run.fit(model, data(), validation())
    return strategy, run, model


def states_alone(seed: int, members: int, *args: Any, **options: Any) -> list[dict[str, Tensor]]:
    return [alone(seed + member, *args, **options)[0].state_dict() for member in range(members)]


def assert_members(expected: Sequence[Any], strategy: EnsembleStrategy, tolerance: float = 0.0) -> None:
    """Assert that each member has the weights and buffers of a run of its own."""
    assert_equal(list(expected), [member.state_dict() for member in strategy.member_modules()], tolerance)
