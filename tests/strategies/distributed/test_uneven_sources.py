"""Sources of which each process has another number of batches, in every stage and under every strategy of processes."""

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from equipoise import HogwildStrategy, PipelineStrategy
from tests.conftest import ignoring
from tests.support.trainer_runs import trainer

pytestmark = ignoring(".* promised .* batches by its length", "The number of samples of a batch cannot be inferred")


class Module(L.LightningModule):
    """Requests loaders of another length in each process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def own_loader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(self.trainer.global_rank)
        return DataLoader(torch.rand(3 + 8 * self.trainer.global_rank, 3, generator=generator), batch_size=2)

    train_dataloader = own_loader
    val_dataloader = own_loader
    test_dataloader = own_loader
    predict_dataloader = own_loader

    def loss(self, batch: Any) -> Tensor:
        if isinstance(batch, dict):
            losses = [self.loss(part) for part in batch.values() if part is not None]
            return torch.stack(losses).mean()
        return self.net(batch).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stream(IterableDataset[Tensor]):
    """Seven samples, which it divides among the processes itself."""

    def __iter__(self) -> Iterator[Tensor]:
        rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
        for number in range(rank, 7, count):
            yield torch.full((3,), float(number))


class Wrong(Sampler[int]):
    """Draws twelve samples, and says another number."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))

    def __len__(self) -> int:
        return self.length


def run(**options: Any) -> Any:
    return trainer(**{"devices": 2, "max_epochs": 2, "num_sanity_val_steps": 0, **options})


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("share", [True, False])
def test_data_sets_of_each_process(strategy: str, share: bool) -> None:
    module = Module()
    fit = run(strategy=strategy, use_distributed_sampler=share)
    fit.fit(module)
    # The second process has 11 samples, or the half of them.
    assert fit.num_training_batches == (3 if share else 6)
    assert fit.global_step == 2 * fit.num_training_batches
    (values,) = fit.test(module, verbose=False)
    assert values == pytest.approx(fit.validate(module, verbose=False)[0])
    if not share:
        assert len(torch.cat(fit.predict(module))) == 3 + 11


class Counting(Module):
    """Counts the batches that the main process reads; its data set may change with the epochs."""

    lengths: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.read = 0

    def train_dataloader(self) -> DataLoader[Any]:
        if self.lengths:
            return DataLoader(Changing(self.lengths), batch_size=None)
        return self.own_loader()

    def on_train_epoch_start(self) -> None:
        if self.lengths:
            self.trainer.train_dataloader.dataset.epoch = self.current_epoch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.read += 1
        return super().training_step(batch, batch_idx)


class Changing(Dataset[Tensor]):
    """Another number of batches in each epoch."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths
        self.epoch = 0

    def __len__(self) -> int:
        return self.lengths[self.epoch]

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((1, 3), float(index))


@pytest.mark.parametrize(("limit", "read", "steps"), [(0.5, 1, 3), (0.4, 0, 2)])
def test_a_fraction_is_that_of_each_process(limit: float, read: int, steps: int) -> None:
    module = Counting()
    fit = run(strategy="ddp", use_distributed_sampler=False, limit_train_batches=limit, limit_val_batches=0)
    fit.fit(module)
    # The processes have 2 and 6 batches.
    assert (module.read, fit.global_step) == (2 * read, 2 * steps)


def test_a_data_set_that_changes_between_epochs() -> None:
    module = Counting()
    module.lengths = (4, 2, 5)
    fit = run(strategy="ddp", use_distributed_sampler=False, limit_val_batches=0, max_epochs=3)
    fit.fit(module)
    assert module.read == fit.global_step == 4 + 2 + 5


@pytest.mark.parametrize("empty", [0, 1])
def test_evaluations_in_which_one_process_has_no_batch(empty: int) -> None:
    class OneEmpty(Module):
        def own_loader(self) -> DataLoader[Any]:
            count = 0 if self.trainer.global_rank == empty else 5
            return DataLoader(torch.arange(3.0 * count).reshape(count, 3), batch_size=2)

        val_dataloader = test_dataloader = predict_dataloader = own_loader

    module = OneEmpty()
    fit = run(strategy="ddp", use_distributed_sampler=False)
    data = DataLoader(torch.arange(15.0).reshape(5, 3), batch_size=2)
    (expected,) = trainer().validate(module, data, verbose=False)
    assert fit.validate(module, verbose=False)[0] == pytest.approx(expected)
    assert fit.test(module, verbose=False)[0] == pytest.approx(expected)
    assert torch.equal(torch.cat(fit.predict(module)), torch.cat(trainer().predict(module, data)))


@pytest.mark.parametrize(("mode", "steps"), [("max_size_cycle", 6), ("max_size", 6), ("min_size", 4)])
def test_loaders_that_are_read_together(mode: Any, steps: int) -> None:
    loaders = {"long": DataLoader(torch.rand(11, 3), 2), "short": DataLoader(torch.rand(5, 3), 2)}
    fit = run(strategy="ddp")
    fit.fit(Module(), CombinedLoader(loaders, mode))
    assert fit.global_step == steps


@pytest.mark.parametrize("length", [6, 12, 18])
def test_a_sampler_that_says_another_number(length: int) -> None:
    fit = run(strategy="ddp")
    fit.fit(Module(), DataLoader(torch.rand(12, 3), 2, sampler=Wrong(length)))
    assert fit.global_step == 2 * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hogwild", "pipeline"])
def test_streams_under_other_strategies(name: str) -> None:
    options: dict[str, Any] = {"strategy": HogwildStrategy(processes=2)}
    if name == "pipeline":
        pipeline = PipelineStrategy(engine="processes", replicas=2, micro_batches=2)
        options = {"strategy": pipeline, "devices": ["cpu"] * 4}
    fit = run(use_distributed_sampler=False, **options)
    fit.fit(Module(), DataLoader(Stream(), 1), DataLoader(Stream(), 1))
    assert fit.global_step == 2 * 4
