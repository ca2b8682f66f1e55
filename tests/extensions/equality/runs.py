"""Runs that leave `metrics.csv` and a checkpoint of every step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import Trainer
from tests.support.quiet import QUIET

__all__ = ["Net", "Nudge", "run"]


class Net(L.LightningModule):
    """Two layers and a dropout in float64; logs the loss of each step, of the validation, and the seconds so far."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.double()

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return (self.layers(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        self.log("step_time", torch.rand((), generator=torch.Generator().manual_seed(id(self) % 2**31)))
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Nudge(L.Callback):
    """Adds a number to one element of a weight after a step.

    Args:
        step: The number of steps after which it does.
        amount: What it adds.
    """

    def __init__(self, step: int, amount: float) -> None:
        self.step = step
        self.amount = amount

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            with torch.no_grad():
                pl_module.layers[0].weight[3, 1] += self.amount


def run(folder: Path, cls: Any = Trainer, *callbacks: Any, every: int = 1, **options: Any) -> Path:
    """Fit a module for two epochs of three steps, and return the folder of the run.

    Args:
        folder: The folder.
        cls: Whose trainer.
        callbacks: Further callbacks.
        every: Steps between two checkpoints.
        options: Arguments of the trainer.
    """
    L.seed_everything(7)
    features = torch.randn(12, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    dataset = TensorDataset(features, features.sum(1, keepdim=True))
    saving = ModelCheckpoint(folder / "checkpoints", save_top_k=-1, every_n_train_steps=every, save_last=True)
    chosen = {**QUIET, "enable_checkpointing": True, "logger": CSVLogger(folder, "", ""), "log_every_n_steps": 1}
    chosen |= {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "num_sanity_val_steps": 0, **options}
    cls(callbacks=[*callbacks, saving, Timer()], **chosen).fit(
        Net(), DataLoader(dataset, 4, shuffle=True), DataLoader(dataset, 6)
    )
    return folder
