"""Loaders of data in memory yield the batches that torch's own iteration yields, and draw the same random numbers."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)
from torch.utils.data._utils.collate import default_collate_fn_map

from equipoise.parallel.batches.sampling import NO_BATCH, Collate
from equipoise.trainer.data import row_loading
from equipoise.trainer.data.memory_rows import sample_size, take
from equipoise.trainer.data.row_loading import open_loader
from tests.support.equality import assert_equal
from tests.support.trainer_runs import Validated, trainer

SIZE = 17


def tensors(seed: int = 0, size: int = SIZE) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 3, 4, 5, generator=draw)
    images[0, 0, 0, 0] = float("nan")
    labels = torch.randint(9, (size,), generator=draw)
    return images, labels, torch.rand(size, 1, generator=draw) < 0.5, torch.zeros(size, 0, dtype=torch.complex64)


def dataset(seed: int = 0, size: int = SIZE) -> TensorDataset:
    return TensorDataset(*tensors(seed, size))


DATASETS = {
    "tensors": dataset,
    "subset": lambda: Subset(dataset(), [3, 5, 7, 7, 16, 0]),
    "subset by a tensor": lambda: Subset(dataset(), torch.arange(9)),  # type: ignore[arg-type]
    "joined subsets of joined": lambda: ConcatDataset(
        [Subset(ConcatDataset([dataset(1), dataset(2)]), [30, 1, 17] * 12), dataset(3, 30)]
    ),
    "stacked": lambda: StackDataset(tensors()[0], dataset(4)),
    "stacked by name": lambda: StackDataset(image=tensors()[0], label=Subset(TensorDataset(tensors()[1]), range(SIZE))),
}


class OwnDataset(TensorDataset):
    pass


OTHERS = {
    "subclass": lambda: OwnDataset(*tensors()),
    "own dataset among others": lambda: ConcatDataset([dataset(), OwnDataset(*tensors())]),
    "parameter": lambda: TensorDataset(nn.Parameter(torch.zeros(3, 2), requires_grad=False)),
    "tensor that requires a gradient": lambda: TensorDataset(torch.zeros(3, 2, requires_grad=True)),
    "other memory format": lambda: TensorDataset(torch.zeros(3, 2, 4, 4).to(memory_format=torch.channels_last)),
    "conjugated": lambda: TensorDataset(torch.zeros(3, 2, dtype=torch.complex64).conj()),
    "sparse": lambda: TensorDataset(torch.eye(3).to_sparse()),
    "other device": lambda: TensorDataset(torch.zeros(3, 2, device="meta")),
    "list": lambda: [1, 2, 3],
    "large samples of several parts": lambda: ConcatDataset([TensorDataset(torch.zeros(2, 2000))] * 2),
}


def assert_same(actual: Any, expected: Any) -> None:
    """As equal as torch's own iteration makes them: to the bit, in the same memory format, and entries in order."""
    assert_equal(expected, actual)
    assert repr(strides_of(actual)) == repr(strides_of(expected))


def strides_of(batch: Any) -> Any:
    return tree_map(lambda leaf: leaf.stride() if isinstance(leaf, Tensor) else None, batch)


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
    "own generator": lambda: DataLoader(dataset(), 4, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "arrays": lambda: DataLoader(dataset(), batch_sampler=Arrays()),
    "negative in joined subsets": lambda: DataLoader(
        ConcatDataset([Subset(dataset(1), [0, 1, 2]), dataset(2)]), 4, sampler=[-1, 0, -2, 3]
    ),
    "tensors as indices": lambda: DataLoader(dataset(), 4, sampler=torch.arange(5)),  # type: ignore[arg-type]
    "a mask as a selection": lambda: DataLoader(
        Subset(TensorDataset(torch.arange(4)), torch.ones(4, dtype=torch.uint8)),
        4,  # type: ignore[arg-type]
    ),
    "joined datasets of other structure": lambda: DataLoader(
        ConcatDataset(
            [
                StackDataset(TensorDataset(torch.zeros(40, 3), torch.ones(40, 3))),
                StackDataset(torch.arange(240.0).view(40, 2, 3)),
            ]
        ),
        64,
        sampler=[*range(50), *range(50, 80)],
    ),
    "joined datasets of other dtypes": lambda: DataLoader(
        ConcatDataset([TensorDataset(torch.ones(3, 2)), TensorDataset(torch.zeros(3, 2, dtype=torch.float64))]),
        40,
        sampler=[0, 4] * 20,
    ),
    "workers": lambda: DataLoader(dataset(), 4, shuffle=True, num_workers=1),
    "workers that stay": lambda: DataLoader(dataset(), 4, shuffle=True, num_workers=1, persistent_workers=True),
}


@pytest.mark.few_cases(9)
@pytest.mark.parametrize("name", LOADERS)
def test_batches_and_random_numbers_are_those_of_torchs_iteration(name: str) -> None:
    torch.manual_seed(3)
    plain = LOADERS[name]()
    expected = [list(plain) for _ in range(2)]
    random_state = torch.get_rng_state()

    torch.manual_seed(3)
    loader = LOADERS[name]()
    data = loader.dataset
    workers = loader.persistent_workers
    actual = [list(open_loader(loader)) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_same(actual, expected)
    assert loader.dataset is data
    assert loader.collate_fn is default_collate
    assert (vars(loader)["_iterator"] is not None) == workers


class Reads:
    """Batches whose rows were taken at once, and those that were read sample by sample."""

    at_once = by_sample = 0


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    counts = Reads()
    samples = row_loading._CollatedRows._samples

    def counted_take(*arguments: Any) -> Any:
        batch = take(*arguments)
        counts.at_once += 1
        return batch

    def counted_samples(self: Any, indices: Any) -> Any:
        counts.by_sample += 1
        return samples(self, indices)

    monkeypatch.setattr(row_loading, "take", counted_take)
    monkeypatch.setattr(row_loading._CollatedRows, "_samples", counted_samples)
    return counts


@pytest.mark.parametrize("name", DATASETS)
def test_rows_of_a_batch_are_taken_at_once(name: str, reads: Reads) -> None:
    data = DATASETS[name]()
    numbers = random.Random(3).choices(range(len(data)), k=240)
    actual = list(open_loader(DataLoader(data, 120, sampler=numbers)))
    assert_same(actual, list(DataLoader(data, 120, sampler=numbers)))
    assert (reads.at_once, reads.by_sample) == (2, 0)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_datasets_whose_rows_cannot_be_taken_at_once(name: str) -> None:
    assert sample_size(OTHERS[name]()) is None


def test_datasets_with_getitems_or_a_getitem_of_the_users_own_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = dataset()
    data.__getitems__ = lambda indices: [1 for _ in indices]  # type: ignore[attr-defined]
    assert sample_size(data) is None
    assert sample_size(dataset()) is not None
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda self, index: 1)
    assert sample_size(dataset()) is None


def test_small_batches_and_few_samples_of_joined_datasets_are_read_sample_by_sample(reads: Reads) -> None:
    list(open_loader(DataLoader(dataset(), 2)))
    assert (reads.at_once, reads.by_sample) == (0, 9)
    list(open_loader(DataLoader(ConcatDataset([dataset(1), dataset(2)]), 30, sampler=[0, SIZE] * 15 + [1] * 30)))
    assert (reads.at_once, reads.by_sample) == (1, 10)


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
        lambda: DataLoader(dataset(), batch_size=None, sampler=[[1, 2], [3]]),
    ],
    ids=["loader", "collate function", "function for workers", "batches that the dataset reads itself"],
)
def test_loaders_with_something_of_the_user_stay(make: Callable[[], DataLoader[Any]], reads: Reads) -> None:
    assert_same(list(open_loader(make())), list(make()))
    assert (reads.at_once, reads.by_sample) == (0, 0)


def test_an_extended_collate_function_is_called(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    def collate(batch: Any, *, collate_fn_map: Any = None) -> Tensor:
        return torch.stack(list(batch)) + 1

    monkeypatch.setitem(default_collate_fn_map, Tensor, collate)
    assert_same(list(open_loader(DataLoader(dataset(), 4))), list(DataLoader(dataset(), 4)))
    assert (reads.at_once, reads.by_sample) == (0, 0)


def test_a_dataset_that_changes_within_a_pass() -> None:
    subset = Subset(dataset(), range(SIZE))
    batches = open_loader(DataLoader(subset, 4))
    next(batches)
    subset.dataset = OwnDataset(*tensors(seed=1))
    assert_same(next(batches), list(DataLoader(subset, 4))[1])


def test_batches_of_processes_may_be_empty() -> None:
    loader = DataLoader(dataset(), batch_sampler=[range(4), []], collate_fn=Collate(default_collate))
    first, second = open_loader(loader)
    assert_same(first, default_collate([dataset()[index] for index in range(4)]))
    assert second is NO_BATCH


def test_training_and_validation_take_rows_at_once(reads: Reads) -> None:
    data = TensorDataset(torch.randn(16, 2))
    run = trainer(max_epochs=2, num_sanity_val_steps=0)
    run.fit(Validated(), DataLoader(data, 4, shuffle=True), DataLoader(data, 8))
    assert (reads.at_once, reads.by_sample) == (12, 0)
