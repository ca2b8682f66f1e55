"""A module that remembers the sizes of the parts of its batches, and its fits with shares of two or three devices."""

from typing import Any

import torch
from torch.utils.data import DataLoader

from equipoise import Trainer
from tests.support.pipelines import quiet
from tests.support.trainer_runs import Small

__all__ = ["Module", "fit", "loader", "trainer"]


class Module(Small):
    """One layer; remembers the sizes of parts and when each of them was computed."""

    def __init__(self) -> None:
        super().__init__()
        # Epoch, batch, device and size of each part. Devices compute at the same time, in any order.
        self.parts: list[tuple[int, int, str, int]] = []

    @property
    def sizes(self) -> list[int]:
        """The sizes of all parts by batch and device."""
        return [size for *_, size in sorted(self.parts, key=lambda part: part[:3])]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.parts.append((self.current_epoch, batch_idx, str(batch.device), len(batch)))
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch))


def loader(batches: int = 12, size: int = 32) -> DataLoader[Any]:
    return DataLoader([torch.randn(size, 2) for _ in range(batches)], batch_size=None)


def trainer(strategy: Any, devices: int = 2, **options: Any) -> Trainer:
    run = {"precision": "32-true", "limit_val_batches": 0, **options}
    return quiet(strategy=strategy, devices=["cpu"] * devices, **run)


def fit(strategy: Any, data: Any = None, devices: int = 2, **options: Any) -> Module:
    module = Module()
    trainer(strategy, devices, **options).fit(module, data or loader(), data or loader())
    return module
