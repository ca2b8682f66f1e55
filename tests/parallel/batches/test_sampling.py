"""Every sample once, none twice, whatever the numbers."""

import pickle
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from equipoise.parallel.batches.sampling import (
    NO_BATCH,
    BatchesInTurn,
    Collate,
    FirstBatches,
    SameOrder,
    UnpaddedDistributedSampler,
)
from equipoise.strategies.distributed.loaders import share_loader


def flat(batches: Any) -> list[int]:
    return [index for batch in batches for index in batch]


@given(count=st.integers(0, 50), processes=st.integers(1, 6), shuffle=st.booleans(), epoch=st.integers(0, 3))
def test_each_sample_is_drawn_in_one_process(count: int, processes: int, shuffle: bool, epoch: int) -> None:
    samplers = [UnpaddedDistributedSampler(range(count), processes, rank, shuffle) for rank in range(processes)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    drawn = [list(sampler) for sampler in samplers]
    assert sorted(flat(drawn)) == list(range(count))
    assert [len(sampler) for sampler in samplers] == [len(each) for each in drawn]
    assert max(map(len, drawn)) - min(map(len, drawn)) <= 1


def test_a_users_sampler_draws_alike_everywhere() -> None:
    class Own:
        def __iter__(self) -> Any:
            return iter([int(torch.randint(100, ())), random.randrange(100)])

        def __len__(self) -> int:
            return 2

    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = list(SameOrder(Own(), seed=3))
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    random.seed(9)
    other = SameOrder(Own(), seed=3)
    assert list(other) == one
    other.set_epoch(1)
    assert list(other) != one


@given(count=st.integers(1, 40), batch_size=st.integers(1, 6), processes=st.integers(1, 5), drop_last=st.booleans())
def test_training_loaders_share_all_samples(count: int, batch_size: int, processes: int, drop_last: bool) -> None:
    loader = DataLoader(range(count), batch_size, shuffle=True, drop_last=drop_last)
    shared = [share_loader(loader, rank, processes, 0, training=True) for rank in range(processes)]
    drawn = [list(each) for each in shared]
    counts = [len(each) for each in drawn]
    assert counts == [len(each) for each in shared]
    assert counts[0] == max(counts)
    assert counts[0] - min(counts) <= 1
    there = flat(batch.tolist() for each in drawn for batch in each)
    assert len(set(there)) == len(there)
    if drop_last:
        assert len(there) == count // (batch_size * processes) * batch_size * processes
    else:
        assert sorted(there) == list(range(count))
    assert loader.batch_size == shared[0].batch_size or shared[0].batch_size is None


@pytest.mark.parametrize("training", [True, False])
def test_batches_of_a_batch_sampler_of_the_users_are_divided(training: bool) -> None:
    batches = BatchSampler(RandomSampler(range(11)), 3, False)
    loader = DataLoader(range(11), batch_sampler=batches)
    drawn = [list(share_loader(loader, rank, 3, 0, training=training)) for rank in range(3)]
    there = flat(batch.tolist() for each in drawn for batch in each)
    assert sorted(there) == list(range(11))
    assert [len(each) for each in drawn] == [2, 1, 1]


def test_a_distributed_sampler_of_the_users_own_is_kept() -> None:
    loader = DataLoader(range(5), 2, sampler=DistributedSampler(range(5), 2, 0))
    assert share_loader(loader, 0, 2, 0, training=True) is loader


def test_what_is_no_loader_gives_batches_in_turn() -> None:
    batches = ["a", "b", "c", "d", "e"]
    for training in (True, False):
        parts = [share_loader(batches, rank, 2, 0, training=training) for rank in range(2)]
        assert [list(each) for each in parts] == [["a", "c", "e"], ["b", "d"]]
        assert [len(each) for each in parts] == [3, 2]


def test_workers_collation_and_generators_stay() -> None:
    generator = torch.Generator()
    loader = DataLoader(range(7), 2, shuffle=True, collate_fn=tuple, generator=generator, num_workers=1)
    shared = share_loader(loader, 1, 4, 0, training=True)
    assert (shared.num_workers, shared.generator) == (1, generator)
    assert [type(batch) for batch in shared] == [tuple]
    assert shared.collate_fn is tuple


def test_the_sign_for_no_batch_survives_a_pickle() -> None:
    assert pickle.loads(pickle.dumps(NO_BATCH)) is NO_BATCH
    assert Collate(list)([]) is NO_BATCH
    assert Collate(list)([1]) == [1]
    first = FirstBatches(BatchSampler(SequentialSampler(range(3)), 2, False), 1)
    assert list(first) == [[0, 1]]
    assert len(first) == 1
    assert len(BatchesInTurn([1, 2, 3], 0, 2)) == 2
