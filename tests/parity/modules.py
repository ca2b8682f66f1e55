"""The networks of the cases, written as users write them."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .data import CLASSES, FEATURES

__all__ = ["Classifier", "network", "with_optimizers"]


def network(dropout: float = 0.0, batch_norm: bool = False) -> nn.Sequential:
    """(batch, 6) → (batch, 3), one hidden layer of 8."""
    norm = nn.BatchNorm1d(8) if batch_norm else nn.Identity()
    return nn.Sequential(nn.Linear(FEATURES, 8), norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, CLASSES))


class Classifier(L.LightningModule):
    """Cross-entropy with SGD and momentum; logs its loss in every step and its accuracy in every evaluation."""

    def __init__(self, dropout: float = 0.0, batch_norm: bool = False, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.net = network(dropout, batch_norm)

    def forward(self, features: Tensor) -> Tensor:
        return self.net(features)

    def loss(self, batch: Any) -> Tensor:
        features, labels = batch
        return F.cross_entropy(self(features), labels)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = self.loss(batch)
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())
        return loss

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch[0]).softmax(1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)


def with_optimizers(
    configure: Callable[[Any], Any], base: type[Any] = Classifier, **arguments: Any
) -> Callable[[], Any]:
    """Makes modules of a class whose `configure_optimizers` is the given function."""

    class Configured(base):
        def configure_optimizers(self) -> Any:
            return configure(self)

    return lambda: Configured(**arguments)
