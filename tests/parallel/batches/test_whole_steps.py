"""Steps keep their samples, whoever divides them."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler

from equipoise.parallel.batches.sampling import SharedBatches
from equipoise.parallel.batches.shares import even_sizes
from equipoise.parallel.batches.whole_steps import AgreedOrder, WholeSteps


@given(count=st.integers(0, 40), size=st.integers(1, 7), joined=st.integers(1, 4), processes=st.integers(1, 5))
def test_any_number_of_processes_divides_the_same_steps(count: int, size: int, joined: int, processes: int) -> None:
    steps = WholeSteps(BatchSampler(range(count), size, False), joined)
    expected = list(steps)
    assert len(steps) == len(expected)
    assert [index for step in expected for index in step] == list(range(count))
    parts = [
        SharedBatches(steps, lambda samples, step: even_sizes(samples, processes), rank) for rank in range(processes)
    ]
    drawn = [list(part) for part in parts]
    for number, step in enumerate(expected):
        assert [index for each in drawn for index in each[number]] == step


def test_the_order_of_the_main_process_counts() -> None:
    torch.manual_seed(3)
    expected = list(RandomSampler(range(9)))
    state = torch.get_rng_state()
    # Another process has other generators, and draws as many numbers.
    torch.manual_seed(4)
    assert list(AgreedOrder(RandomSampler(range(9)), lambda order: expected)) == expected
    torch.manual_seed(3)
    list(AgreedOrder(RandomSampler(range(9)), lambda order: order))
    assert torch.equal(torch.get_rng_state(), state)


class Numbered:
    """A batch sampler that knows its epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> object:
        return iter([[self.epoch], [1]])


def test_a_sampler_learns_the_epoch() -> None:
    batches = Numbered()
    steps = WholeSteps(batches, joined=2)
    steps.sampler.set_epoch(5)
    assert list(steps) == [[5, 1]]
