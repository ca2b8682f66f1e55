"""Loaders of every kind: combined, shuffled, without length, limited, reloaded, overfitted."""

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler

from equipoise import ConfigurationError

from .. import data
from ..harness import Case, Record, parity
from ..modules import Classifier


class Dropping(Classifier):
    """Draws from the generator in every step."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)


class OverMapping(Classifier):
    """Trains on a batch from each of several loaders, given as a mapping or a list."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = batch.values() if isinstance(batch, dict) else batch
        losses = [self.loss(part) for part in parts if part is not None]
        self.log("parts", float(len(losses)), batch_size=1)
        return torch.stack(losses).sum()


class Reloads(Classifier):
    """Makes other loaders in every epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, int]] = []

    def train_dataloader(self) -> Any:
        self.made.append(("train", self.current_epoch))
        return data.loader(3 + self.current_epoch, seed=self.current_epoch)

    def val_dataloader(self) -> Any:
        self.made.append(("val", self.current_epoch))
        return data.loader(2, seed=10 + self.current_epoch)


class Fading(IterableDataset[tuple[Tensor, Tensor]]):
    """Samples without a length: three batches, none, and two."""

    def __init__(self) -> None:
        self.batches = iter([3, 0, 2])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(list(data.samples(next(self.batches) * data.BATCH)))


def endless() -> dict[str, Any]:
    class NoLength:
        def __iter__(self) -> Iterator[Any]:
            while True:
                yield from data.loader(3, 1)

    return {"train_dataloaders": NoLength(), "val_dataloaders": data.loader(2, 2)}


def train_only(loaders: Any) -> Any:
    return lambda: {"train_dataloaders": loaders()}


def noisy(**options: Any) -> Any:
    train, val = data.Noisy(6, 1), data.Noisy(3, 2)
    return lambda: {
        "train_dataloaders": DataLoader(train, data.BATCH, shuffle=True, **options),
        "val_dataloaders": DataLoader(val, data.BATCH, **options),
    }


def own_samplers() -> dict[str, Any]:
    dataset = data.samples(24, 1)
    weighted = WeightedRandomSampler([1.0 + i % 3 for i in range(24)], 20)
    batched = BatchSampler(RandomSampler(dataset, generator=torch.Generator().manual_seed(3)), 5, drop_last=True)
    return {
        "train_dataloaders": DataLoader(dataset, batch_size=data.BATCH, sampler=weighted),
        "val_dataloaders": DataLoader(dataset, batch_sampler=batched),
    }


def batches(record: Record) -> Any:
    return record["counters"]["num_training_batches"]


def made(trainer: Any) -> Any:
    return trainer.lightning_module.made


def two_lists() -> Any:
    return [data.loader(3, 1), data.loader(5, 2)]


CASES = [
    Case(
        name="dictionary-of-loaders",
        module=OverMapping,
        data=train_only(lambda: {"a": data.loader(3), "b": data.loader(5, 2)}),
    ),
    Case(
        name="one-after-another",
        data=train_only(lambda: CombinedLoader(two_lists(), "sequential")),
        raises=ValueError,
        refuses=ConfigurationError,
    ),
    Case(
        name="shortest-combined",
        module=OverMapping,
        data=lambda: data.combined("min_size"),
        proves=lambda r: batches(r) == 3,
    ),
    Case(name="cycled-combined", module=OverMapping, data=lambda: data.combined("max_size_cycle")),
    Case(
        name="one-worker", module=Dropping, data=noisy(num_workers=1), options={"num_sanity_val_steps": 1}, watch=False
    ),
    Case(name="own-samplers", module=Dropping, data=own_samplers),
    Case(
        name="unsized-and-empty-in-the-second-epoch",
        data=lambda: {**data.sized(val=2), "train_dataloaders": DataLoader(Fading(), data.BATCH)},
        options={"max_epochs": 3, "num_sanity_val_steps": 0},
        proves=lambda r: (r["counters"]["global_step"], r["counters"]["current_epoch"]) == (5, 3),
    ),
    Case(
        name="endless",
        data=endless,
        options={"limit_train_batches": 5},
        proves=lambda r: r["counters"]["global_step"] == 10,
    ),
    Case(name="limit-zero", options={"limit_train_batches": 0}, proves=lambda r: r["counters"]["global_step"] == 0),
    Case(name="overfit-fraction", data=data.sized, options={"overfit_batches": 0.5}, proves=lambda r: batches(r) == 3),
    Case(name="fast-dev-run-of-three", options={"fast_dev_run": 3}, proves=lambda r: r["counters"]["global_step"] == 3),
    Case(
        name="module-makes-loaders",
        module=Reloads,
        data=dict,
        observe=made,
        options={"max_epochs": 3},
        proves=lambda r: r["observed"] == [("val", 0), ("train", 0)],
    ),
    Case(
        name="reloaded-every-second-epoch",
        module=Reloads,
        data=dict,
        observe=made,
        options={"max_epochs": 5, "reload_dataloaders_every_n_epochs": 2, "num_sanity_val_steps": 0},
    ),
]

test_parity = parity(CASES)
