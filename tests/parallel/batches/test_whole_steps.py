"""Steps keep their samples, whoever divides them."""

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler

from equipoise.parallel.batches.whole_steps import AgreedOrder, WholeSteps


@pytest.mark.parametrize(("count", "joined"), [(0, 2), (12, 2), (13, 2), (7, 1)])
def test_a_step_joins_batches_of_the_sampler(count: int, joined: int) -> None:
    steps = WholeSteps(BatchSampler(range(count), 3, False), joined)
    expected = list(BatchSampler(range(count), 3 * joined, False))
    assert list(steps) == expected
    assert len(steps) == len(expected)


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
