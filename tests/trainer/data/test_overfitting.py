"""Overfitting: the same batches in every epoch, in the order of the first."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

from tests.support.trainer_runs import Stream, Validated, loader, trainer, with_step
from tests.trainer.data.few_batches import loaders_of

pytestmark = pytest.mark.filterwarnings("ignore:`overfit_batches` needs the same batches")


@pytest.mark.parametrize("overfit", [2, 0.5])
def test_overfitting_reads_the_same_batches_in_every_epoch(overfit: float) -> None:
    seen: dict[str, list[Any]] = {"training": [], "validation": []}

    class Module(Validated):
        def loss(self, batch: Any) -> Any:
            seen["training" if self.training else "validation"].append(batch[0][:, 0].tolist())
            return super().loss(batch)

    run = trainer(overfit_batches=overfit, max_epochs=3, num_sanity_val_steps=0)
    run.fit(Module(), loader(4, shuffle=True), loader(4))
    assert seen == {"training": [[0, 1], [2, 3]] * 3, "validation": [[0, 1], [2, 3]] * 3}


class Shuffling(Sampler[list[int]]):
    """Batches without end, in another order in each pass."""

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield torch.randint(8, (2,)).tolist()


class Ordered(Sampler[list[int]]):
    """Batches in an order of the epoch, or of a generator of its own."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator, self.epoch = generator, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        generator = self.generator or torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(8, generator=generator).view(4, 2).tolist()


# Resumed runs have generators of their own.
SEEDS = itertools.count()
BATCH_SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "of torch": lambda data: BatchSampler(RandomSampler(data), 2, drop_last=False),
    "of the user": lambda data: Shuffling(),
    "by epoch": lambda data: Ordered(),
    "by its generator": lambda data: Ordered(torch.Generator().manual_seed(next(SEEDS))),
}


@pytest.mark.parametrize("kind", BATCH_SAMPLERS)
def test_overfitting_repeats_what_a_batch_sampler_draws_first(kind: str, tmp_path: Path) -> None:
    def fit(epochs: int, ckpt_path: Path | None = None) -> list[Any]:
        seen: list[Any] = []
        data = TensorDataset(torch.arange(16.0).view(8, 2))
        module = with_step(lambda module, batch: seen.append(batch[0].tolist()) or module.loss(batch))
        run = trainer(overfit_batches=3, max_epochs=epochs)
        run.fit(module, DataLoader(data, batch_sampler=BATCH_SAMPLERS[kind](data)), ckpt_path=ckpt_path)
        run.save_checkpoint(tmp_path / "x.ckpt")
        return seen

    seen = fit(3)
    assert seen == seen[:3] * 3
    assert fit(4, tmp_path / "x.ckpt") == seen[:3]


def test_overfitting_calls_the_optional_methods_of_a_batch_sampler() -> None:
    checked = []

    class Checking(Ordered):
        def check_dataset(self, dataset: Any) -> None:
            checked.append(dataset)

        def planned_batches(self) -> list[Any]:
            return [([0, 1], None)]

    data = TensorDataset(torch.arange(8.0))
    read: Any = loaders_of(DataLoader(data, batch_sampler=Checking()), 2, overfit=True).flat[0].batch_sampler
    assert checked == [data]
    assert read.planned_batches() == [([0, 1], None)]


def test_overfitting_warns_that_it_does_not_shuffle() -> None:
    with pytest.warns(UserWarning, match="shuffling of the train loader is turned off"):
        chosen = loaders_of(loader(shuffle=True), 2, overfit=True)
    assert isinstance(chosen.flat[0].sampler, SequentialSampler)
    stream = DataLoader(Stream(4))
    assert loaders_of(stream, 2, overfit=True).flat[0] is stream
