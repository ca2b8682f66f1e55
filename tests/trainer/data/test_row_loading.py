"""Loaders of data in memory yield the batches that torch's own iteration yields, and draw the same random numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data._utils.collate import default_collate_fn_map

from equipoise import Trainer
from equipoise.interop.lightning.loaders import seed_workers
from equipoise.parallel.batches.sampling import NO_BATCH, Collate
from equipoise.trainer.data.row_loading import rows_at_once
from tests.trainer.data.test_memory_rows import assert_same, dataset
from tests.trainer.optimization.test_accumulation import Net, make_batches

SIZE = 17


class Arrays:
    """A batch sampler that yields arrays of numpy, and lists of numbers of numpy."""

    def __iter__(self) -> Any:
        yield np.arange(3)
        yield list(np.arange(3, 6))

    def __len__(self) -> int:
        return 2


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(dataset(), 4),
    "shuffled": lambda: DataLoader(dataset(), 4, shuffle=True),
    "last dropped": lambda: DataLoader(dataset(), 4, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(dataset(), 4, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "subset": lambda: DataLoader(Subset(dataset(), range(3, 12)), 2, shuffle=True),
    "random subset": lambda: DataLoader(dataset(), 3, sampler=SubsetRandomSampler(range(2, 9))),
    "with weights": lambda: DataLoader(dataset(), 3, sampler=WeightedRandomSampler([1.0] * SIZE, 10)),
    "own batches": lambda: DataLoader(dataset(), batch_sampler=BatchSampler(RandomSampler(range(SIZE)), 5, False)),
    "arrays": lambda: DataLoader(dataset(), batch_sampler=Arrays()),
    "negative": lambda: DataLoader(dataset(), 2, sampler=[0, -1, -SIZE, 3]),
    "tensors as indices": lambda: DataLoader(dataset(), 2, sampler=torch.arange(5)),  # type: ignore[arg-type]
    "workers": lambda: DataLoader(dataset(), 4, shuffle=True, num_workers=2),
    "workers that stay": lambda: DataLoader(dataset(), 4, shuffle=True, num_workers=1, persistent_workers=True),
}


def opened(loader: DataLoader[Any]) -> Any:
    with rows_at_once(loader):
        return iter(loader)


@pytest.mark.parametrize("name", LOADERS)
def test_batches_are_the_same(name: str) -> None:
    torch.manual_seed(3)
    plain = LOADERS[name]()
    expected = [list(plain) for _ in range(2)]
    random_state = torch.get_rng_state()

    torch.manual_seed(3)
    loader = LOADERS[name]()
    data = loader.dataset
    actual = [list(opened(loader)) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_same(actual, expected)
    assert loader.dataset is data
    assert loader.collate_fn is default_collate


@pytest.fixture
def samples_read(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Indices of samples that a TensorDataset reads one by one."""
    read: list[Any] = []
    original = TensorDataset.__getitem__

    def getitem(self: TensorDataset, index: Any) -> Any:
        read.append(index)
        return original(self, index)

    monkeypatch.setattr(TensorDataset, "__getitem__", getitem)
    return read


def test_no_sample_is_read_by_itself(samples_read: list[Any]) -> None:
    list(opened(DataLoader(dataset(), 4, shuffle=True)))
    assert samples_read == []


class OwnLoader(DataLoader[Any]):
    pass


def own_collate(samples: Any) -> Any:
    return default_collate(samples)


@pytest.mark.parametrize(
    "make",
    [
        lambda: OwnLoader(dataset(), 4),
        lambda: DataLoader(dataset(), 4, collate_fn=own_collate),
        lambda: DataLoader(dataset(), 4, worker_init_fn=print),
    ],
    ids=["loader", "collate function", "function for workers"],
)
def test_loaders_with_something_of_the_user_stay(make: Callable[[], DataLoader[Any]], samples_read: list[Any]) -> None:
    list(opened(make()))
    assert samples_read == list(range(SIZE))


def test_batches_that_the_dataset_reads_itself(samples_read: list[Any]) -> None:
    """Without batches of the loader, the sampler's item is the index."""
    loader = DataLoader(dataset(), batch_size=None, sampler=[[1, 2], [3]])
    assert [len(batch[0]) for batch in opened(loader)] == [2, 1]
    assert samples_read == [[1, 2], [3]]


def test_an_extended_collate_function(samples_read: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def collate(batch: Any, *, collate_fn_map: Any = None) -> Tensor:
        return torch.stack(list(batch)) + 1

    monkeypatch.setitem(default_collate_fn_map, Tensor, collate)
    list(opened(DataLoader(dataset(), 4)))
    assert samples_read == list(range(SIZE))


def test_seeded_workers_are_no_obstacle(samples_read: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    loader = DataLoader(dataset(), 4)
    seed_workers(loader, 0)
    assert loader.worker_init_fn is not None
    list(opened(loader))
    assert samples_read == []


@pytest.mark.parametrize("indices", [[SIZE], [0, -SIZE - 1], ["0"], []], ids=str)
def test_errors_are_those_of_the_samples(indices: list[Any]) -> None:
    with pytest.raises(Exception) as expected:  # noqa: PT011 - the same, whichever it is
        list(DataLoader(dataset(), batch_sampler=[indices]))
    with pytest.raises(type(expected.value)) as actual:
        list(opened(DataLoader(dataset(), batch_sampler=[indices])))
    assert str(actual.value) == str(expected.value)


def test_a_dataset_that_changes_within_a_pass() -> None:
    data = dataset()
    batches = opened(DataLoader(data, 4))
    next(batches)
    data.tensors = tuple(tensor + 1 for tensor in data.tensors)
    assert_same(next(batches), list(DataLoader(data, 4))[1])


def test_batches_of_processes_may_be_empty() -> None:
    loader = DataLoader(dataset(), batch_sampler=[[0, 1], []], collate_fn=Collate(default_collate))
    first, second = opened(loader)
    assert_same(first, default_collate([dataset()[0], dataset()[1]]))
    assert second is NO_BATCH


def test_training_takes_rows_at_once(samples_read: list[Any]) -> None:
    """In training, in validation, and for several loaders that are read together."""

    class Pairs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["one"], batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", super().training_step(batch, batch_idx))

    ((features, labels),) = make_batches([SIZE])
    data = TensorDataset(features, labels)
    trainer = Trainer(
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loaders = {"one": DataLoader(data, 4, shuffle=True), "other": DataLoader(data, 4)}
    trainer.fit(Pairs(), loaders, DataLoader(data, 8, sampler=SequentialSampler(data)))
    assert samples_read == []
