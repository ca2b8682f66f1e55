"""Small data sets and the loaders of the cases, as arguments of `fit`."""

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

__all__ = [
    "BATCH",
    "CLASSES",
    "FEATURES",
    "Noisy",
    "Stream",
    "combined",
    "loader",
    "odd",
    "samples",
    "several_val",
    "shuffled",
    "sized",
    "unsized",
]

FEATURES, CLASSES, BATCH = 6, 3, 4


def samples(count: int, seed: int = 0) -> TensorDataset:
    """Gaussian clusters: features (count, 6) and labels (count,), the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    return TensorDataset(centres[labels] + 0.3 * torch.randn(count, FEATURES, generator=generator), labels)


def loader(batches: int, seed: int = 0, odd: int = 0, **options: Any) -> DataLoader[Any]:
    """A loader of `batches` full batches; `odd` more samples make a short last one."""
    return DataLoader(samples(batches * BATCH + odd, seed), batch_size=BATCH, **options)


def sized(train: int = 6, val: int = 3, odd: int = 0) -> dict[str, Any]:
    """A training and a validation loader in fixed order."""
    return {"train_dataloaders": loader(train, 1, odd), "val_dataloaders": loader(val, 2, odd)}


def odd() -> dict[str, Any]:
    """Both loaders with a short last batch."""
    return sized(5, 3, odd=2)


def shuffled() -> dict[str, Any]:
    """Both loaders shuffled by torch's global generator."""
    return {"train_dataloaders": loader(6, 1, shuffle=True), "val_dataloaders": loader(3, 2, shuffle=True)}


def several_val() -> dict[str, Any]:
    """A training loader and two validation loaders of unequal length."""
    return {"train_dataloaders": loader(4, 1), "val_dataloaders": [loader(3, 2), loader(2, 3, odd=2)]}


def combined(mode: str) -> dict[str, Any]:
    """Two training loaders of unequal length, combined as Lightning's `CombinedLoader` does."""
    return {"train_dataloaders": CombinedLoader({"a": loader(5, 1), "b": loader(3, 2)}, mode)}


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Samples without a length."""

    def __init__(self, batches: int, seed: int) -> None:
        self.samples = samples(batches * BATCH, seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([self.samples[index] for index in range(len(self.samples))])


def unsized(train: int = 6, val: int = 3) -> dict[str, Any]:
    """Loaders that do not know their length."""
    return {
        "train_dataloaders": DataLoader(Stream(train, 1), batch_size=BATCH),
        "val_dataloaders": DataLoader(Stream(val, 2), batch_size=BATCH),
    }


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Augments with torch's global generator, so the order of draws between loader and network shows."""

    def __init__(self, batches: int, seed: int) -> None:
        self.samples = samples(batches * BATCH, seed)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        features, label = self.samples[index]
        return features + 0.1 * torch.randn(FEATURES), label
