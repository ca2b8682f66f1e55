"""A run of which one process kills itself, once, and what it must have in common with an undisturbed one."""

import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import DDPStrategy, Trainer
from tests.support.equality import assert_equal
from tests.support.networks.numbered import Samples
from tests.support.quiet import QUIET

__all__ = ["EPOCHS", "STEPS", "assert_as_undisturbed", "train"]

SAMPLES, BATCH, EPOCHS, STEPS = 25, 2, 3, 7  # of an epoch; in the last one the second process has no batch


class Distorted(Samples):
    """Samples that are distorted anew whenever one is read."""

    def __getitem__(self, index: int) -> Any:
        features, label, index = super().__getitem__(index)
        return features + 0.1 * torch.randn(4, dtype=torch.float64), label, index


class Killed(L.LightningModule):
    """One process kills itself in the middle of a step, once.

    Args:
        rank: Which process.
        step: The step of the run, from 0.
        marker: A file that says that it happened.
    """

    def __init__(self, rank: int, step: int, marker: Path) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3))
        self.rank, self.step, self.marker = rank, step, marker
        self.began_at = -1

    def on_train_start(self) -> None:
        self.began_at = self.trainer.global_step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        now = self.global_rank, STEPS * self.current_epoch + batch_idx
        if now == (self.rank, self.step) and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def train(folder: Path, rank: int, step: int, engine: Any = "torch", accumulate: int = 1, seed: int = 5) -> Killed:
    """Trains, or resumes from the last checkpoint in a folder."""
    data = Distorted(SAMPLES)
    torch.manual_seed(seed)
    module = Killed(rank, step, folder / "marker")
    trainer = Trainer(
        strategy=DDPStrategy(engine=engine, timeout=300.0),
        devices=["cpu", "cpu"],
        max_epochs=EPOCHS,
        accumulate_grad_batches=accumulate,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=2, save_last=True)],
        precision="64-true",
        **{**QUIET, "enable_checkpointing": True},
    )
    trainer.fit(module, DataLoader(data, batch_size=BATCH, shuffle=True), ckpt_path="last")
    assert trainer.current_epoch == EPOCHS
    return module


def assert_as_undisturbed(folder: Path, state: dict[str, Tensor], **options: Any) -> None:
    """See that a run has the weights of one that nothing happened to, whose batches and noise were the same."""
    folder.mkdir()
    expected = train(folder, 0, -1, **options)
    assert not expected.marker.exists()
    assert_equal(dict(expected.state_dict()), dict(state), 1e-12)
