"""Data that take the time that their arguments say."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset[Tensor]):
    """Samples that are waited for, as those of a disk, or computed, as pictures are decoded.

    Args:
        count: Number of samples.
        waiting: Seconds of waiting for each.
        computing: Seconds of computing for each.
    """

    def __init__(self, count: int, waiting: float, computing: float) -> None:
        self.count = count
        self.waiting = waiting
        self.computing = computing

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        if self.waiting:
            time.sleep(self.waiting)
        end = time.perf_counter() + self.computing
        while time.perf_counter() < end:
            pass
        return torch.ones(16) * (index % 7)


class Rows(LightningDataModule):
    """Loaders of such samples.

    Args:
        batch_size: Samples of a batch.
        count: Number of training samples.
        waiting: Seconds of waiting for each sample.
        computing: Seconds of computing for each sample.
        collating: Seconds of collating a batch.
        num_workers: Workers of both loaders.
    """

    def __init__(
        self,
        *,
        batch_size: int = 8,
        count: int = 8000,
        waiting: float = 0.0,
        computing: float = 0.0,
        collating: float = 0.0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.samples = Samples(count, waiting, computing)
        self.collating = collating
        self.num_workers = num_workers

    def collate(self, samples: list[Tensor]) -> Tensor:
        if self.collating:
            time.sleep(self.collating)
        return torch.stack(samples)

    def train_dataloader(self) -> Any:
        return DataLoader(
            self.samples, self.batch_size, collate_fn=self.collate, num_workers=self.num_workers, drop_last=True
        )


class Validated(Rows):
    """The same with validations of four batches.

    Args:
        val_waiting: Seconds of waiting for each of their samples.
        arguments: As for `Rows`.
    """

    def __init__(self, *, val_waiting: float = 0.0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.val_samples = Samples(4 * self.batch_size, val_waiting, 0.0)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val_samples, self.batch_size, num_workers=self.num_workers)


class Hidden(Rows):
    """The same with a number of workers that no argument changes."""

    def __init__(self, *, waiting: float) -> None:
        super().__init__(waiting=waiting)


class Batches(Rows):
    """Batches of a generator, which no workers read."""

    def train_dataloader(self) -> Iterator[Tensor]:
        return Generated()


class Generated:
    """Batches that are waited for."""

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(1000):
            time.sleep(0.02)
            yield torch.ones(8, 16)
