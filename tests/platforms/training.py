"""Short trainings, whose results do not depend on the operating system, and arguments that do."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import Trainer

__all__ = ["FITS", "Perceptron", "fit"]

QUIET: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
# Arguments of the trainer, by the name of the strategy.
FITS: dict[str, dict[str, Any]] = {
    "single_device": {"devices": 1},
    "dp": {"devices": ["cpu", "cpu"]},
    "ddp": {"devices": 2},
}


class Perceptron(L.LightningModule):
    """Classifies rows of eight numbers; logs a value more from the second epoch on, so the log is written again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        if self.current_epoch > 0:
            self.log("größe", batch[0].abs().mean())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit(strategy: str, folder: Path) -> dict[str, Tensor]:
    """Return the weights after two epochs, and a third one of a run that continues.

    Args:
        strategy: A key of `FITS`.
        folder: Receives the files of the run.
    """
    torch.manual_seed(2)
    data = TensorDataset(torch.randn(24, 8), torch.randint(3, (24,)))
    loader = DataLoader(data, batch_size=6)
    module = Perceptron()
    checkpoint = None
    for epochs in (2, 3):
        trainer = Trainer(
            strategy=strategy,
            max_epochs=epochs,
            log_every_n_steps=1,
            logger=CSVLogger(folder, name="", version="", flush_logs_every_n_steps=2),
            **FITS[strategy],
            **QUIET,
        )
        trainer.fit(module, loader, loader, ckpt_path=checkpoint)
        checkpoint = trainer.checkpoint_callback.best_model_path
    return module.state_dict()
