"""The loaders of a stage: how many batches each process has, copies of loaders, who draws which random numbers."""

import random
from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
)

from equipoise import ConfigurationError, Strategy, Trainer
from equipoise.interop.lightning import loaders as lightning_loaders
from equipoise.interop.torch.loaders import with_sampler
from equipoise.parallel.communication.processes import Processes
from equipoise.strategies.distributed.epoch_length import Extent
from equipoise.trainer.data import loaders
from equipoise.trainer.data.loader_state import separate_workers, separates_workers
from tests.support.trainer_runs import Small, Validated, loader, trainer, with_step
from tests.trainer.data.few_batches import Counted, loaders_of, numbers

pytestmark = pytest.mark.filterwarnings("ignore:`overfit_batches` needs the same batches")


# The loaders of a stage


class Ranks(Processes):
    """One of two processes. It knows the extents of the other."""

    world_size = 2

    def __init__(self, rank: int, other: list[Extent]) -> None:
        self.rank = rank
        self.other = other

    def gather_objects(self, value: Any) -> list[Any]:
        _, lengths = value
        other = (self.other, lengths)
        return [value, other] if self.rank == 0 else [other, value]


def loaders_of_rank(
    given: Any, other: list[Extent], rank: int = 0, limit: float = 1.0, stage: str = "train", share: bool = False
) -> loaders.Loaders:
    strategy = Strategy()
    strategy.processes = Ranks(rank, other)
    source = loaders.Source(stage, given, Small())
    return loaders.Loaders(source, given, limit=limit, overfit=False, strategy=strategy, share=share)


NO_SAMPLES: Any = DataLoader([], batch_size=1)


@pytest.mark.parametrize(("stage", "rank"), [("train", 0), ("predict", 1)])
def test_a_process_may_have_no_batch_where_another_has(stage: str, rank: int) -> None:
    chosen = loaders_of_rank(NO_SAMPLES, [Extent(3)], rank, stage=stage)
    assert chosen.extent.num_batches == 0
    assert [extent.num_batches for extent in chosen.joint_extents] == ([0, 3] if rank == 0 else [3, 0])
    assert numbers(chosen.streams()[0]) == []
    with pytest.raises(ConfigurationError, match=rf"the {stage} loader that was passed is empty"):
        loaders_of_rank(NO_SAMPLES, [Extent(0)], rank, stage=stage)


def test_a_fraction_of_batches_may_leave_a_process_none() -> None:
    assert loaders_of_rank(loader(1), [Extent(10, 5)], limit=0.5).extent.num_batches == 0
    with pytest.raises(ConfigurationError, match=r"limit_train_batches=0.5 of the 1 batches .* at least .*=1, or"):
        loaders_of_rank(loader(1), [Extent(1, 0)], limit=0.5)


def test_one_of_several_loaders_may_not_be_empty_in_one_process() -> None:
    given = [NO_SAMPLES, loader(4)]
    with pytest.raises(ConfigurationError, match=r"^Loader 0 of those .* is empty in process 0, where"):
        loaders_of_rank(given, [Extent(2), Extent(3)])
    with pytest.raises(ConfigurationError, match=r"^Loader 1 of those .* is empty in process 0, where"):
        loaders_of_rank([loader(2), loader(4)], [Extent(2), Extent(0)], rank=1)
    # All of them may be, and so may one that ends by itself.
    assert loaders_of_rank([NO_SAMPLES, NO_SAMPLES], [Extent(2), Extent(3)]).extent.num_batches == 0
    assert loaders_of_rank(CombinedLoader(given, "max_size"), [Extent(2), Extent(3)]).extent.num_batches == 4


@pytest.mark.parametrize("stage", ["val", "test", "predict"])
def test_an_evaluation_that_shuffles_is_noticed(stage: str) -> None:
    with pytest.warns(UserWarning, match=f"The {stage} loader shuffles"):
        loaders_of(loader(shuffle=True), stage=stage)


# Copies of loaders


class Own(DataLoader[Any]):
    """A loader that cannot be made again without knowing what it took."""

    def __init__(self, path: str, *, count: int) -> None:
        self.path = path
        super().__init__(Counted(count), batch_size=2, num_workers=1, persistent_workers=True)


class Backwards(Sampler[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count - 1, -1, -1))

    def __len__(self) -> int:
        return self.count


def test_a_copy_of_a_loader_has_a_sampler_and_workers_of_its_own() -> None:
    original = Own("somewhere", count=4)
    assert numbers(original) == [[0, 1], [2, 3]]
    copy = with_sampler(original, Backwards(4))
    assert type(copy) is Own
    assert (copy.path, copy.dataset) == ("somewhere", original.dataset)
    assert numbers(copy) == [[3, 2], [1, 0]]
    assert numbers(original) == [[0, 1], [2, 3]]
    del original, copy


# Random numbers


class Noise(Dataset[Any]):
    """Data set that returns what each generator of a worker draws."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(torch.rand(())), random.random(), float(np.random.random())], dtype=torch.float64)


def test_workers_are_seeded_as_lightning_seeds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    drawn = []

    def step(module: Any, batch: Any) -> Any:
        drawn[-1].append(batch.tolist())
        return module.layer.weight.sum()

    for cls in (L.Trainer, Trainer):
        drawn.append([])
        torch.manual_seed(0)
        source = DataLoader(Noise(), num_workers=2)
        trainer(cls).fit(with_step(step), source)
        assert source.worker_init_fn is not None
    assert drawn[0] == drawn[1]
    assert len({tuple(sample) for batch in drawn[0] for sample in batch}) == 4


def test_workers_are_left_alone_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def init_after(**options: Any) -> Any:
        source = loader(**options)
        lightning_loaders.seed_workers(source, 0)
        return source.worker_init_fn

    monkeypatch.delenv("PL_SEED_WORKERS", raising=False)
    assert init_after() is None
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    assert init_after(worker_init_fn=print) is print
    assert lightning_loaders.seeds_workers(init_after())
    lightning_loaders.seed_workers([1, 2], 0)  # no loader of torch
    monkeypatch.setattr(lightning_loaders, "_SEED_WORKER", None)
    assert init_after() is None


def test_workers_of_processes_are_separated_only_where_they_would_draw_alike() -> None:
    private = {"generator": torch.Generator(), "num_workers": 1}
    for options, rank, is_separated in (
        (private, 1, True),
        (private, 0, False),
        ({**private, "num_workers": 0}, 1, False),
        ({"num_workers": 1}, 1, False),
        ({**private, "worker_init_fn": print}, 1, False),
    ):
        source = DataLoader(Noise(), **options)
        separate_workers(source, rank)
        assert separates_workers(source.worker_init_fn) == is_separated


class ToldEpochs:
    """Notes the epochs of which it is told."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class ToldSampler(ToldEpochs, Backwards):
    pass


class ToldDataset(ToldEpochs, Counted):
    pass


class ToldStream(ToldEpochs, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.ones(4, 2))


TOLD: dict[str, Any] = {
    "sampler": lambda told: DataLoader(torch.ones(4, 2), sampler=told, batch_size=2),
    "sampler of a batch sampler": lambda told: DataLoader(torch.ones(4, 2), batch_sampler=BatchSampler(told, 2, False)),
    "data set": lambda told: DataLoader(told, batch_size=2),
    "stream": lambda told: DataLoader(told, batch_size=2),
}


@pytest.mark.parametrize("name", TOLD)
def test_set_epoch_is_called_once_at_the_start_of_each_epoch(name: str) -> None:
    told = {"data set": ToldDataset(4), "stream": ToldStream()}.get(name, ToldSampler(4))
    trainer(max_epochs=3).fit(with_step(lambda module, batch: module.loss([torch.ones(2, 2)])), TOLD[name](told))
    assert told.epochs == [0, 1, 2]


def test_a_method_may_return_no_loader_for_validation() -> None:
    class NoneToday(Validated):
        def val_dataloader(self) -> Any:
            return []

    module, run = NoneToday(), trainer(max_epochs=2)
    with pytest.warns(UserWarning, match=r"`NoneToday.val_dataloader\(\)` holds no loader"):
        run.fit(module, loader())
    assert module.ran == ["training"] * 6


def test_a_shuffled_loader_without_samples_names_the_remedy() -> None:
    module = Small()
    module.train_dataloader = lambda: DataLoader([], shuffle=True)
    with pytest.raises(ConfigurationError, match=r"num_samples=0\. Its data set is empty\. .* shuffle=False"):
        trainer().fit(module)
