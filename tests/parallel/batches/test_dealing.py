"""Batches are dealt in turn: each to one process, in the same order in all of them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from equipoise.interleave import interleave
from equipoise.parallel.batches.dealing import deal_batches, is_dealt

SAMPLES = list(range(11))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(SAMPLES)


def shuffled() -> DataLoader[int]:
    return DataLoader(SAMPLES, batch_size=2, shuffle=True)


LOADERS: dict[str, Any] = {
    "in order": lambda: DataLoader(SAMPLES, batch_size=2),
    "shuffled": shuffled,
    "batch sampler": lambda: DataLoader(SAMPLES, batch_sampler=BatchSampler(RandomSampler(SAMPLES), 3, False)),
    "samples": lambda: DataLoader(SAMPLES, batch_size=None, sampler=SequentialSampler(SAMPLES)),
    "stream": lambda: DataLoader(Stream(), batch_size=2),
    "list": lambda: [torch.tensor([number]) for number in SAMPLES],
}


@pytest.mark.parametrize(("name", "count"), list(zip(LOADERS, [1, 2, 3, 7, 2, 3], strict=True)))
def test_each_batch_goes_to_one_process(name: str, count: int) -> None:
    parts = []
    for rank in range(count):
        part = deal_batches(LOADERS[name](), rank, count)
        assert is_dealt(part)
        parts.append([torch.as_tensor(batch).reshape(-1) for batch in part])
    batches = interleave(parts)
    assert sorted(torch.cat(batches).tolist()) == SAMPLES
    if name not in ("shuffled", "batch sampler"):
        whole = [torch.as_tensor(batch).reshape(-1) for batch in LOADERS[name]()]
        assert list(map(torch.Tensor.tolist, batches)) == list(map(torch.Tensor.tolist, whole))
    assert not is_dealt(LOADERS[name]())
