"""A module and a data module with full annotations."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import LightningDataModule, LightningModule

Batch = tuple[Tensor, Tensor]


class Classifier(LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.network(features)
        return scores

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        features, labels = batch
        loss = nn.functional.cross_entropy(self.network(features), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        features, labels = batch
        self.log("val_loss", nn.functional.cross_entropy(self.network(features), labels))

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        scores: Tensor = self.network(batch[0])
        return scores.argmax(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Noise(LightningDataModule):
    def __init__(self, samples: int = 24) -> None:
        super().__init__()
        self.data = TensorDataset(torch.randn(samples, 8), torch.randint(3, (samples,)))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.data, batch_size=4)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.data, batch_size=4)
