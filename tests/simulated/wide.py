"""A network whose activations fill simulated devices, and a batch that does not fit."""

import gc
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from tests.simulated.devices.installation import extension
from tests.support.batches import CLASSES, FEATURES, TOKENS
from tests.support.networks.transparency import Base

__all__ = ["SIZES", "WIDTH", "Second", "Wide"]


SIZES = [1024, 1024, 1024]


WIDTH = 160


class Wide(Base):
    """Its activations need more memory than its parameters and its optimiser."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(6)]
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(FEATURES * TOKENS, WIDTH), *layers, nn.Tanh(), nn.Linear(WIDTH, CLASSES)
        )

    def forward(self, features: Tensor) -> Any:
        return self.net(features)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, foreach=False)


class Second(L.Callback):
    """Limits a device before the second step, to what it holds and a part of what the step needs.

    Args:
        device: Index of the device.
        needed: Bytes that the step needs beside what the device holds; 0: they are measured, and nothing is limited.
    """

    def __init__(self, device: int, needed: int = 0) -> None:
        self.device, self.needed = device, needed

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1 or trainer.current_epoch > 0:
            return
        gc.collect()  # what a cycle holds would be free when memory runs out
        self.held = extension().allocated_bytes(self.device)
        extension().reset_peak(self.device)
        if self.needed:
            extension().set_limit(self.device, self.held + int(0.75 * self.needed))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and trainer.current_epoch == 0 and not self.needed:
            self.needed = extension().peak_bytes(self.device) - self.held
