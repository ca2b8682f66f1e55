"""Loaders of a stage without a run, a data set that counts what is read, and batches as numbers."""

from typing import Any

import torch
from torch.utils.data import Dataset

from equipoise import Strategy
from equipoise.trainer.data import loaders
from tests.support.trainer_runs import Small

__all__ = ["Counted", "loaders_of", "numbers"]


class Counted(Dataset[int]):
    """Tells which samples were read."""

    def __init__(self, count: int) -> None:
        self.count, self.read = count, []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


def numbers(batches: Any) -> list[Any]:
    return [torch.as_tensor(batch[0] if isinstance(batch, list) else batch).tolist() for batch in batches]


def loaders_of(given: Any, limit: float = 1.0, stage: str = "train", overfit: bool = False) -> loaders.Loaders:
    source = loaders.Source(stage, given, Small())
    return loaders.Loaders(source, given, limit=limit, overfit=overfit, strategy=Strategy())
