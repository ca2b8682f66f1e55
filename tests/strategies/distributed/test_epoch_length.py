"""When the number of batches of a pass is certain."""

import math
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from equipoise.parallel.batches.dealing import Turns
from equipoise.strategies.distributed.epoch_length import Certainty, Extent, certainty_of, draw_order, joined_extent
from equipoise.strategies.distributed.loaders import share_loader


class Own(Sampler[int]):
    """A sampler that says another number than it draws."""

    def __init__(self, count: int = 12, length: int = 18) -> None:
        self.count = count
        self.length = length

    def __iter__(self) -> Any:
        return iter(range(self.count))

    def __len__(self) -> int:
        return self.length


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class Lying(DataLoader[int]):
    def __len__(self) -> int:
        return 7


NUMBERS = list(range(24))

LOADERS: dict[str, tuple[Any, Certainty]] = {
    "a list": ([1, 2], Certainty.AT_REQUEST),
    "a list in turn": (Turns([1, 2], 0, 2), Certainty.AT_REQUEST),
    "an iterable": (iter([1, 2]), Certainty.AT_END),
    "in order": (DataLoader(NUMBERS, 2), Certainty.AT_REQUEST),
    "shuffled": (DataLoader(NUMBERS, 2, shuffle=True), Certainty.AT_REQUEST),
    "samples": (DataLoader(NUMBERS, None), Certainty.AT_REQUEST),
    "batches of torch": (
        DataLoader(NUMBERS, batch_sampler=BatchSampler(RandomSampler(NUMBERS), 3, False)),
        Certainty.AT_REQUEST,
    ),
    "a list of batches": (DataLoader(NUMBERS, batch_sampler=[[0, 1], [2]]), Certainty.AT_REQUEST),
    "a sampler of one's own": (DataLoader(NUMBERS, 2, sampler=Own()), Certainty.AT_END),
    "a batch sampler of one's own": (
        DataLoader(NUMBERS, batch_sampler=BatchSampler(Own(), 2, False)),
        Certainty.AT_END,
    ),
    "a stream": (DataLoader(Stream(), 2), Certainty.AT_END),
    "a loader of one's own": (Lying(NUMBERS, 2), Certainty.AT_END),
}


@pytest.mark.parametrize("name", LOADERS)
def test_when_the_number_of_batches_is_certain(name: str) -> None:
    loader, certainty = LOADERS[name]
    assert certainty_of(loader) is certainty


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(NUMBERS, 2, sampler=Own()),
        DataLoader(NUMBERS, None, sampler=Own(6, 9)),
        DataLoader(NUMBERS, batch_sampler=BatchSampler(Own(), 2, False)),
    ],
    ids=["batches", "samples", "batch sampler"],
)
def test_the_order_that_processes_share_is_certain_once_it_is_drawn(loader: Any) -> None:
    shared = [share_loader(loader, rank, 2, 0, training=True) for rank in range(2)]
    assert {certainty_of(each) for each in shared} == {Certainty.ONCE_DRAWN}
    promised = [len(each) for each in shared]
    for each in shared:
        draw_order(each)
    assert [len(each) for each in shared] == [3, 3] != promised
    assert [len(list(each)) for each in shared] == [3, 3]


def test_orders_of_torch_are_certain_in_all_processes() -> None:
    for sampler in (SequentialSampler(NUMBERS), RandomSampler(NUMBERS)):
        loader = DataLoader(NUMBERS, 2, sampler=sampler, drop_last=True)
        assert certainty_of(share_loader(loader, 1, 2, 0, training=True)) is Certainty.AT_REQUEST


def test_the_longest_and_least_certain_of_the_processes_counts() -> None:
    joined = joined_extent([Extent(3, 9, Certainty.AT_REQUEST), Extent(5, 4, Certainty.ONCE_DRAWN)])
    assert joined == Extent(5, 9, Certainty.ONCE_DRAWN)
    assert Extent(math.inf, 4).num_batches == 4
