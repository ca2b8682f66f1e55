"""Batches within a budget of tokens: each sample once, the same steps with any number of processes."""

import random
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from equipoise import TokenBatchSampler
from equipoise.strategies.distributed.loaders import share_loader
from tests.extensions.tokens.sequences import padded, tokens
from tests.support.trainer_runs import Small, Validated, refuses, refuses_fit, trainer


def lengths_of(seed: int) -> tuple[list[int], int]:
    """Random lengths, and a budget that the longest one keeps."""
    draw = random.Random(seed)
    longest = draw.choice([1, 5, 60, 300])
    lengths = [draw.randint(1, longest) for _ in range(draw.randint(1, 300))]
    return lengths, max(lengths) * draw.randint(1, 12)


def flat(batches: Any) -> list[int]:
    return [index for batch in batches for index in batch]


def size(lengths: list[int], batch: list[int], padded: bool) -> int:
    drawn = [lengths[index] for index in batch]
    return max(drawn) * len(drawn) if padded else sum(drawn)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_each_sample_once_within_the_budget(seed: int, padded: bool) -> None:
    lengths, budget = lengths_of(seed)
    for shuffle in (True, False):
        sampler = TokenBatchSampler(lengths, budget, padded=padded, shuffle=shuffle, seed=seed)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            batches = list(sampler)
            assert sorted(flat(batches)) == list(range(len(lengths)))
            assert all(0 < size(lengths, batch, padded) <= budget for batch in batches)
            assert len(batches) == len(sampler)


def test_epochs_differ_and_repeat() -> None:
    lengths, budget = [random.Random(3).randint(1, 200) for _ in range(500)], 1000
    sampler, other = (TokenBatchSampler(lengths, budget, seed=5) for _ in range(2))
    epochs = []
    for epoch in (0, 1, 2):
        sampler.set_epoch(epoch)
        other.set_epoch(epoch)
        epochs.append(list(sampler))
        assert epochs[-1] == list(sampler) == list(other)
    partners = [{frozenset(batch) for batch in batches} for batches in epochs]
    assert len(partners[0] & partners[1]) < len(partners[0]) / 10
    assert epochs[0] != list(TokenBatchSampler(lengths, budget, seed=6))


def test_batches_are_nearly_full() -> None:
    """Padding and free room stay small, although each epoch mixes the samples."""
    draw = random.Random(1)
    lengths = [min(512, max(4, int(draw.lognormvariate(4, 0.8)))) for _ in range(5000)]
    total = sum(lengths)
    by_longest = TokenBatchSampler(lengths, 4096)
    assert sum(size(lengths, batch, True) for batch in by_longest) < 1.06 * total
    assert len(by_longest) < 1.15 * total / 4096
    assert len(TokenBatchSampler(lengths, 4096, padded=False)) < 1.1 * total / 4096
    assert len(TokenBatchSampler(lengths, 4096, padded=False, spread=0)) <= total / 4096 + 2


def test_batches_keep_limits_of_samples_and_padding() -> None:
    assert max(map(len, TokenBatchSampler([1] * 50, 30, max_samples=7))) == 7
    assert max(map(len, TokenBatchSampler([1] * 50, 30, max_samples=7, padded=False))) == 7
    # Padded to 8 tokens each.
    assert [len(batch) for batch in TokenBatchSampler([5] * 6, 16, pad_to_multiple_of=8)] == [2, 2, 2]
    alone = list(TokenBatchSampler([3, 9, 2, 8], 6, allow_longer=True))
    assert [1] in alone
    assert [3] in alone
    assert list(TokenBatchSampler(numpy.array([1, 5, 3]), 5, shuffle=False)) == [[1], [2], [0]]


def test_a_tiny_spread_lets_equal_lengths_alone_change_places() -> None:
    """There are more bands of lengths than memory would hold."""
    lengths = [random.Random(seed).randint(1, 9) for seed in range(50)]

    def sizes(**options: Any) -> list[list[int]]:
        return sorted([lengths[index] for index in batch] for batch in TokenBatchSampler(lengths, 20, **options))

    assert sizes(spread=1e-9) == sizes(spread=1e-300) == sizes(shuffle=False)


@pytest.mark.parametrize("count", [2, 4])
def test_lengths_of_another_data_set_are_refused(count: int) -> None:
    data = [torch.ones(2, dtype=torch.int64)] * count
    loader = DataLoader(data, batch_sampler=TokenBatchSampler([2, 2, 2], 4), collate_fn=padded)
    words = ["lengths of 3 samples, but the data set", f" has {count}"]
    refuses_fit(Small(), *words, data=loader)
    refuses(lambda: trainer().validate(Validated(), loader), *words)


def test_a_data_set_without_a_length_is_taken() -> None:
    TokenBatchSampler([2, 2], 4).check_dataset(iter([]))


def test_a_wrong_deal_is_refused() -> None:
    class Wrong(TokenBatchSampler):
        def deal_step(self, batches: Any, count: int) -> list[list[int]]:
            return list(batches)

    loader = DataLoader(tokens([2] * 3), batch_sampler=Wrong([2] * 3, 2), collate_fn=padded)
    part = share_loader(loader, 0, 2, 0, training=True)
    refuses(lambda: list(part), "`deal_step` returned 1 lists of samples for 2 processes")


@pytest.mark.parametrize(
    ("lengths", "options", "text"),
    [
        ([3, 9, 2, 8], {}, "Sample 1 has 9 tokens, more than max_tokens=6; so have 2 of 4 samples"),
        ([3, 0], {}, "Sample 1 has 0 tokens"),
        ([], {}, "a list of shape [0]"),
        (torch.empty(0, dtype=torch.int64), {}, "not a Tensor of shape [0] and type torch.int64"),
        ([[1, 2], [3]], {}, "lengths is a sequence with the number of tokens of each sample, not a list"),
        (torch.rand(3), {}, "not a Tensor of shape [3] and type torch.float32"),
        ([3, 2.5], {}, "not a list of shape [2] and type torch.float32"),
        ([3, None], {}, "not a list: Could not infer dtype of NoneType"),
        (None, {}, "not a NoneType: Could not infer dtype"),
        (torch.tensor([1j]), {}, "not a Tensor of shape [1] and type torch.complex64"),
        ([3, 5], {"padded": False, "row_tokens": 4}, "Sample 1 has 5 tokens, more than row_tokens=4"),
        ([1], {"padded": False, "row_tokens": 4, "allow_longer": True}, "allow_longer=True has no use with row_tokens"),
        ([1], {"row_tokens": 4}, "row_tokens=4 needs padded=False, and max_tokens from 4"),
        ([1], {"spread": -1}, "spread is a share from 0"),
        ([1], {"max_samples": 0}, "max_samples must be an integer of at least 1, or None"),
    ],
)
def test_arguments_that_are_refused(lengths: Any, options: dict[str, Any], text: str) -> None:
    refuses(lambda: TokenBatchSampler(lengths, 6, **options), text)


# Several processes.


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("seed", range(40))
def test_ranks_have_the_steps_of_one_process(seed: int) -> None:
    """Samples and number of batches of each step, for 40 sets of lengths and 1 to 4 processes."""
    lengths, budget = lengths_of(seed)
    by_longest = bool(seed % 2)
    data = tokens(lengths, seed)
    loader = DataLoader(
        data,
        batch_sampler=TokenBatchSampler(lengths, budget, padded=by_longest, seed=seed),
        collate_fn=padded,
    )
    alone = list(loader.batch_sampler)
    for processes in range(1, 5):
        shares = [share_loader(loader, rank, processes, 0, training=True) for rank in range(processes)]
        indices = [list(share.batch_sampler) for share in shares] if processes > 1 else [alone]
        steps = [alone[begin : begin + processes] for begin in range(0, len(alone), processes)]
        # 1. Each process has as many batches; in each step they have the samples of as many batches of one process.
        assert [len(batches) for batches in indices] == [len(steps)] * processes == [len(share) for share in shares]
        for number, step in enumerate(steps):
            parts = [batches[number] for batches in indices]
            assert sorted(flat(parts)) == sorted(flat(step))
            assert all(size(lengths, part, by_longest) <= budget for part in parts if part)
            # 2. None lacks a batch, unless there are fewer samples.
            assert all(parts) or len(flat(step)) < processes


def test_the_last_step_has_a_sample_for_each_process() -> None:
    """One long sample is never the whole last step, if batches of more samples exist."""
    lengths = [100] * 9 + [10] * 10
    for epoch in range(20):
        sampler = TokenBatchSampler(lengths, 100)
        sampler.set_epoch(epoch)
        *_, last = sampler
        assert len(last) == 10


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (8, 5)])
def test_steps_for_other_numbers_of_processes(before: int, after: int) -> None:
    lengths, budget = [random.Random(2).randint(1, 90) for _ in range(400)], 300
    sampler = TokenBatchSampler(lengths, budget)
    batches = list(sampler)[:before]
    parts = sampler.deal_step(batches, after)
    assert len(parts) == after
    assert sorted(flat(parts)) == sorted(flat(batches))
    limit = budget if after >= before else budget * -(-before // after)
    assert all(size(lengths, part, True) <= limit * 1.5 for part in parts)
