"""Callbacks and a logger that take the time that their arguments say."""

import time
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import CSVLogger


class Slow(Callback):
    """A callback that acts after each batch, or some.

    Args:
        seconds: Seconds that it takes.
        every_n_steps: Number of batches from one to the next.
    """

    def __init__(self, seconds: float = 0.02, every_n_steps: int = 1) -> None:
        self.seconds = seconds
        self.every_n_steps = every_n_steps

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.every_n_steps == 0:
            time.sleep(self.seconds)


class SlowProgressBar(ProgressBar):
    """A bar on a terminal far away.

    Args:
        refresh_rate: Number of batches from one drawing to the next.
    """

    def __init__(self, refresh_rate: int = 1) -> None:
        super().__init__()
        self.refresh_rate = refresh_rate

    def disable(self) -> None:
        self.refresh_rate = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self.refresh_rate and (batch_idx + 1) % self.refresh_rate == 0:
            time.sleep(0.02)


class SlowLogger(CSVLogger):
    """A logger on a slow disk."""

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        time.sleep(0.03)
        super().log_metrics(metrics, step)
