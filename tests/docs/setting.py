"""Names that pages use without an import: a module, its data, and what every program imports.

The hidden set-up of a page takes them from here: `from tests.docs.setting import *`. `module`, `data` and `loader` are
a `Classifier`, a `Points` and its loader.
"""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import Trainer

__all__ = [
    "Classifier",
    "DataLoader",
    "LightningModule",
    "Path",
    "Points",
    "Trainer",
    "data",
    "loader",
    "module",
    "nn",
    "torch",
]

_FEATURES, _CLASSES = 8, 10


class Classifier(LightningModule):
    """A small network, whose layers have the names that pages use."""

    def __init__(self, width: int = 16, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.backbone = nn.Sequential(nn.Linear(_FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.backbone(features))  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels = batch
        loss = nn.functional.cross_entropy(self(features), labels)
        self.log("train_loss", loss)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).softmax(dim=1)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Points(LightningDataModule):
    """Random samples with labels."""

    def __init__(self, batch_size: int = 16, samples: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size
        generator = torch.Generator().manual_seed(1)
        features = torch.randn(samples, _FEATURES, generator=generator)
        self.samples = TensorDataset(features, torch.randint(_CLASSES, (samples,), generator=generator))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.samples, batch_size=self.batch_size, shuffle=True)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.samples, batch_size=self.batch_size)

    predict_dataloader = test_dataloader


# Made by `__getattr__`.
module: Classifier
data: Points
loader: DataLoader[Any]


def __getattr__(name: str) -> Any:
    """Return a new object for each page that imports it, so that no page changes what another one sees."""
    if name == "module":
        return Classifier()
    if name == "data":
        return Points()
    if name == "loader":
        return Points().train_dataloader()
    raise AttributeError(name)
