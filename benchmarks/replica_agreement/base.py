"""The module and the trainer that planted faults and healthy programs share."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import Trainer

__all__ = ["Program", "data", "fit"]


class Program(LightningModule):
    """A perceptron of float64, (batch, 4) → (batch, 1), whose hooks a program overrides.

    Attributes:
        net: The network.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def loss(self, batch: Any) -> Tensor:
        features, targets = batch
        return (self.net(features) - targets).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


def data(samples: int = 24, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    """Samples with other values in each process's share."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(samples, 4, dtype=torch.float64, generator=generator)
    return DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=batch_size, **options)


def fit(module: LightningModule, strategy: Any = "ddp", loaders: Callable[[], Any] = data, **options: Any) -> Trainer:
    """Train on CPUs, in two processes and for two epochs unless the options say otherwise."""
    ckpt_path = options.pop("ckpt_path", None)
    settings = {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": 2,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
        **options,
    }
    trainer = Trainer(strategy=strategy, **settings)
    torch.manual_seed(2)
    trainer.fit(module, loaders(), ckpt_path=ckpt_path)
    return trainer
