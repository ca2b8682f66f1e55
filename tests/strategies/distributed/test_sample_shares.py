"""DDP on unequal devices: shares that are measured."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from equipoise import ConfigurationError, DDPStrategy
from equipoise.parallel.batches.calibration import SimulatedDevice
from tests.strategies.runs import numbers_in, trainer
from tests.support.equality import assert_equal
from tests.support.networks.numbered import Samples, numbered


class Sizes(L.Callback):
    """Remembers the sizes of the first process's batches."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sizes.append(len(batch[0]))


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["torch", "native"])
def test_measured_shares_give_a_slow_process_less_and_are_saved(engine: Any, tmp_path: Path) -> None:
    """The second process is slower by far, so it gets less; every sample is seen once, and gradients are exact."""
    one, many, sizes = numbered(), numbered(), Sizes()
    trainer("single_device", 1, max_epochs=1).fit(one, DataLoader(Samples(390), batch_size=24))
    strategy = DDPStrategy(engine=engine, shares="auto", simulated={1: SimulatedDevice(seconds_per_sample=0.01)})
    run = trainer(strategy, 2, max_epochs=1, callbacks=[sizes])
    run.fit(many, DataLoader(Samples(390), batch_size=12))
    assert strategy.shares is not None
    assert strategy.shares[0] > 2 * strategy.shares[1]
    assert sizes.sizes[:7] == [12, 12, 9, 15, 12, 9, 15]
    assert sizes.sizes[-2] == strategy.shares[0]
    assert numbers_in(many.seen[0]) == list(range(390))
    assert_equal(one, many, 1e-12)
    run.save_checkpoint(path := tmp_path / "last.ckpt")
    other = DDPStrategy(engine=engine, shares="auto")
    again, sizes = trainer(other, 2, max_epochs=2, limit_train_batches=1, callbacks=[sizes]), Sizes()
    again.fit(numbered(), DataLoader(Samples(390), batch_size=12), ckpt_path=path)
    assert other.shares == strategy.shares  # nothing is measured anew


@pytest.mark.thorough
def test_measured_shares_while_a_loader_reads_ahead() -> None:
    """Steps that were cut before the shares were known stay as they are, in all processes."""
    module = numbered()
    strategy = DDPStrategy(shares="auto", simulated={0: SimulatedDevice(seconds_per_sample=0.001)})
    data = DataLoader(Samples(400), batch_size=8, shuffle=True, num_workers=1, multiprocessing_context="fork")
    trainer(strategy, 2, max_epochs=2).fit(module, data)
    assert strategy.shares is not None
    assert [numbers_in(epoch) for epoch in module.seen] == [list(range(400))] * 2


class Batches:
    """Two batches; no DataLoader."""

    def __iter__(self) -> Iterator[Any]:
        return iter(list(DataLoader(Samples(4), batch_size=2)))

    def __len__(self) -> int:
        return 2


class Stream(IterableDataset[Any]):
    """Four samples that share themselves out."""

    def __init__(self, first: int = 0, step: int = 1) -> None:
        self.samples = [Samples(4)[index] for index in range(first, 4, step)]

    def shard(self, num_shards: int, index: int) -> "Stream":
        return Stream(index, num_shards)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


class Own(L.LightningDataModule):
    """A loader whose sampler shares the samples out."""

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        sampler: Any = DistributedSampler(range(8), 2, self.trainer.global_rank, shuffle=False)
        return DataLoader(Samples(8), batch_size=2, sampler=sampler)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"train_dataloaders": Batches()}, "which this Batches has not"),
        ({"train_dataloaders": DataLoader(Stream(), batch_size=2)}, "but Stream is an IterableDataset, which shares"),
        ({"datamodule": Own()}, "but its DistributedSampler shares the samples out already"),
    ],
    ids=["no loader", "stream", "sampler"],
)
def test_given_shares_are_refused_and_measured_ones_left_out_where_a_loader_cannot_be_cut(data: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"shares need a DataLoader with a batch_size to cut, {why}"):
        trainer(DDPStrategy(shares=[1, 3]), 2).fit(numbered(), **data)
    trainer(strategy := DDPStrategy(shares="auto"), 2).fit(numbered(), **data)
    assert strategy.shares is None
