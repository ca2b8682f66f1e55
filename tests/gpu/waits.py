"""A fit in which CUDA raises an error where the host waits."""

from typing import Any

import torch
from lightning.pytorch import Callback

from equipoise import Trainer
from tests.gpu.runs import GPU, QUIET, Classifier, loader

__all__ = ["FIRST", "STEPS", "Guard", "Logging", "train"]


STEPS = [8] * 10


FIRST = 3  # in earlier steps optimisers make their states, pipelines are cut, libraries choose their kernels


class Guard(Callback):
    """Lets CUDA raise an error where the host waits, from one step to the end of the epoch's last step.

    Attributes:
        guarded: Number of steps in which it would have been raised.
    """

    def __init__(self) -> None:
        self.guarded = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == FIRST:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.guarded += torch.cuda.get_sync_debug_mode() == 2
        if batch_idx == len(STEPS) - 1:
            torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        torch.cuda.set_sync_debug_mode("default")


class Logging(Classifier):
    """Logs its loss, and a number."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("number", float(batch_idx), on_epoch=True)
        self.log("loss_of_epoch", loss, on_step=False, on_epoch=True)
        return loss


def train(make: Any = Logging, *, pinned: bool = True, **options: Any) -> Guard:
    """Train for one epoch, of which the later steps must not wait."""
    guard = Guard()
    callbacks = [*options.pop("callbacks", ()), guard]
    trainer = Trainer(**{**QUIET, "devices": [GPU], "max_epochs": 1, "callbacks": callbacks, **options})
    trainer.fit(make(), loader(STEPS, pinned=pinned))
    return guard
