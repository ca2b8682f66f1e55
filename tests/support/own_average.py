"""An average of the weights by a callback of the user's own."""

import copy
from typing import Any

import torch

import equipoise

__all__ = ["Own"]


class Own(equipoise.Callback):
    """An average without a class of Lightning's, which keeps the weights of training during a validation."""

    copies_weights = True
    average: Any = None
    kept: Any = None

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.average = copy.deepcopy(module)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        for average, weight in zip(self.average.parameters(), module.parameters(), strict=True):
            average.lerp_(weight, 0.3)

    @torch.no_grad()
    def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
        self.kept = [weight.clone() for weight in module.parameters()]
        for average, weight in zip(self.average.parameters(), module.parameters(), strict=True):
            weight.copy_(average)

    @torch.no_grad()
    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        for kept, weight in zip(self.kept, module.parameters(), strict=True):
            weight.copy_(kept)
        self.kept = None
