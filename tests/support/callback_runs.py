"""A module, data, and a clock that moves only when a step is taken."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["Clock", "Small", "loader", "ticking", "trainer"]


class Clock:
    """Seconds that pass only by `tick`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def tick(self, seconds: float) -> None:
        self.now += seconds


class Small(L.LightningModule):
    """Logs a loss that is the number of the step, so that every shown value tells when it was logged.

    Args:
        at_step: Called with the module and "train", "val", "test" or "predict" and the batch index in every step.
    """

    def __init__(self, at_step: Callable[[Any, str, int], None] = lambda module, stage, batch_idx: None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.at_step = at_step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.at_step(self, "train", batch_idx)
        self.log("loss", float(self.global_step), prog_bar=True)
        return self.layer(batch[0]).square().mean()

    def on_train_epoch_end(self) -> None:
        self.log("late", 100.0 + self.current_epoch, prog_bar=True)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.at_step(self, "val", batch_idx)
        self.log("val_loss", 10.0 + self.current_epoch, prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.at_step(self, "test", batch_idx)
        self.log("test_loss", 20.0, prog_bar=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self.at_step(self, "predict", batch_idx)
        return self.layer(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def ticking(clock: Clock, seconds: float) -> Callable[[Any, str, int], None]:
    """Every step takes some seconds."""
    return lambda module, stage, batch_idx: clock.tick(seconds)


def loader(batches: int, batch_size: int = 1) -> DataLoader:
    return DataLoader(TensorDataset(torch.ones(batches * batch_size, 2)), batch_size=batch_size)


def trainer(cls: type[L.Trainer] = L.Trainer, **options: Any) -> L.Trainer:
    """Lightning's own trainer, alone with the callbacks it is given."""
    defaults = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    return cls(**{**defaults, **options})
