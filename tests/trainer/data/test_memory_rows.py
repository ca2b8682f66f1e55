"""Rows of datasets in memory, taken at once, are the collated samples to the bit."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset, default_collate

from equipoise.trainer.data.memory_rows import rows_of

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
    "one tensor": lambda: TensorDataset(tensors()[0]),
    "subset": lambda: Subset(dataset(), [3, 5, 7, 7, 16, 0]),
    "subset of a subset": lambda: Subset(Subset(dataset(), range(2, 15)), [0, 12, 4, 9, 2]),
    "subset by a tensor": lambda: Subset(dataset(), torch.arange(9)),  # type: ignore[arg-type]
    "joined": lambda: ConcatDataset([dataset(1, 40), Subset(dataset(2), [4, 2] * 20), dataset(3, 30)]),
    "joined subsets of joined": lambda: ConcatDataset(
        [Subset(ConcatDataset([dataset(1), dataset(2)]), [30, 1, 17] * 12), dataset(3, 30)]
    ),
    "stacked": lambda: StackDataset(tensors()[0], dataset(4)),
    "stacked by name": lambda: StackDataset(image=tensors()[0], label=Subset(TensorDataset(tensors()[1]), range(SIZE))),
}


def samples_of(data: Any, indices: Any) -> Any:
    """Return a batch as a DataLoader reads it."""
    if hasattr(data, "__getitems__"):
        return default_collate(data.__getitems__(indices))
    return default_collate([data[index] for index in indices])


def assert_same(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    if isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype
        assert actual.shape == expected.shape
        assert actual.stride() == expected.stride()
        assert torch.equal(actual.nan_to_num(), expected.nan_to_num())
        return
    assert len(actual) == len(expected)
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        actual, expected = actual.values(), expected.values()
    for one, other in zip(actual, expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("name", DATASETS)
def test_rows_are_the_collated_samples(name: str) -> None:
    data = DATASETS[name]()
    rows = rows_of(data)
    assert rows is not None
    seed = random.randrange(1000)
    print("seed", seed)
    draw = random.Random(seed)
    for size in (1, 70, 200):
        indices = draw.choices(range(len(data)), k=size)
        assert_same(rows.take(indices), samples_of(data, indices))


def test_size_of_a_sample() -> None:
    sizes = [4 * 3 * 4 * 5, 8, 1, 0]
    for data in (dataset(), Subset(dataset(), [1]), ConcatDataset([dataset(), Subset(dataset(), [])])):
        rows = rows_of(data)
        assert rows is not None
        assert rows.sample_size == sum(sizes)
    stacked = rows_of(StackDataset(dataset(), tensors()[0]))
    assert stacked is not None
    assert stacked.sample_size == sum(sizes) + sizes[0]


def test_rows_are_copies() -> None:
    data = dataset()
    rows = rows_of(data)
    assert rows is not None
    rows.take([1, 2])[0].zero_()
    assert data.tensors[0][1].abs().sum() > 0


class OwnDataset(TensorDataset):
    pass


class OwnSubset(Subset[Any]):
    pass


class Numbers(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return SIZE


OTHERS = {
    "subclass": lambda: OwnDataset(*tensors()),
    "subclass of Subset": lambda: OwnSubset(dataset(), [1, 2]),
    "own dataset": Numbers,
    "own dataset in a subset": lambda: Subset(Numbers(), [1, 2]),
    "own dataset among others": lambda: ConcatDataset([dataset(), OwnDataset(*tensors())]),
    "own dataset beside others": lambda: StackDataset(dataset(), Numbers()),
    "parameter": lambda: TensorDataset(nn.Parameter(torch.zeros(3, 2))),
    "tensor that requires a gradient": lambda: TensorDataset(torch.zeros(3, 2, requires_grad=True)),
    "other memory format": lambda: TensorDataset(torch.zeros(3, 2, 4, 4).to(memory_format=torch.channels_last)),
    "conjugated": lambda: TensorDataset(torch.zeros(3, 2, dtype=torch.complex64).conj()),
    "sparse": lambda: TensorDataset(torch.eye(3).to_sparse()),
    "other device": lambda: TensorDataset(torch.zeros(3, 2, device="meta")),
    "list": lambda: [1, 2, 3],
    "large samples of several parts": lambda: ConcatDataset([TensorDataset(torch.zeros(2, 2000))] * 2),
    "tensor with a gradient beside others": lambda: StackDataset(torch.zeros(2), torch.zeros(2, requires_grad=True)),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_other_datasets_have_no_rows(name: str) -> None:
    assert rows_of(OTHERS[name]()) is None


def test_methods_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    data = dataset()
    data.__getitems__ = lambda indices: [1 for _ in indices]  # type: ignore[attr-defined]
    assert rows_of(data) is None
    assert rows_of(dataset()) is not None
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda self, index: 1)
    assert rows_of(dataset()) is None


def test_joined_datasets_need_several_samples_of_each() -> None:
    rows = rows_of(ConcatDataset([dataset(1), dataset(2)]))
    assert rows is not None
    assert len(rows.take([1, 2])[0]) == 2
    with pytest.raises(LookupError, match="too few"):
        rows.take([0, SIZE] * 15)


def test_datasets_that_change() -> None:
    data, subset = dataset(1), Subset(dataset(2), [1, 2])
    joined, stacked = ConcatDataset([dataset(3), dataset(4)]), StackDataset(dataset(5), dataset(6))
    all_rows = [rows_of(each) for each in (data, subset, joined, stacked)]
    data.tensors = tensors(7)
    subset.dataset = data
    joined.datasets[1] = data
    stacked.datasets = (data, data)
    for rows in all_rows:
        assert rows is not None
        with pytest.raises(LookupError, match="now"):
            rows.take([0, 1])


def test_parts_that_do_not_fit_together() -> None:
    """Torch stacks samples of several dtypes, and refuses several shapes."""
    for other in (torch.zeros(3, 2, dtype=torch.float64), torch.zeros(3, 4)):
        rows = rows_of(ConcatDataset([TensorDataset(torch.zeros(3, 2)), TensorDataset(other)]))
        assert rows is not None
        with pytest.raises((RuntimeError, IndexError)):
            rows.take([0, 4] * 20)
