"""Parts of a batch on several devices, and their division into micro-batches."""

import torch
from torch import nn

from equipoise.parallel.batches.splitting import Splitter
from equipoise.strategies.replicated.placed_parts import PlacedParts


def test_each_micro_batch_has_a_piece_of_every_part() -> None:
    parts = PlacedParts.of([torch.arange(4.0), torch.arange(4.0, 6.0)], indices=[0, 2], sizes=[4, 2])
    first, second = parts.split(2, Splitter(nn.Linear(1, 1), 0))
    assert [part.tolist() for part in first] == [[0, 1], [4]]
    assert [part.tolist() for part in second] == [[2, 3], [5]]
    assert (first.indices, first.sizes) == ((0, 2), (2, 1))


def test_the_last_micro_batches_lack_parts_of_few_samples() -> None:
    parts = PlacedParts.of([torch.arange(1.0), torch.arange(1.0, 4.0)], indices=[1, 3], sizes=[1, 3])
    micro_batches = parts.split(3, Splitter(nn.Linear(1, 1), 0))
    assert [micro_batch.indices for micro_batch in micro_batches] == [(1, 3), (3,), (3,)]
    assert [micro_batch.sizes for micro_batch in micro_batches] == [(1, 1), (1,), (1,)]
    samples = torch.cat([part for micro_batch in micro_batches for part in micro_batch])
    assert sorted(samples.tolist()) == [0, 1, 2, 3]
