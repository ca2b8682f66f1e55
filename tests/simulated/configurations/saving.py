"""A checkpoint in the midst of a fit."""

from pathlib import Path
from typing import Any

import lightning as L

__all__ = ["Saving"]


class Saving(L.Callback):
    """Saves a checkpoint after a batch of the first epoch.

    Args:
        path: Its file.
        batch: Index of the batch.
    """

    def __init__(self, path: Path, batch: int) -> None:
        self.path, self.batch = path, batch

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx == self.batch:
            trainer.save_checkpoint(self.path)
