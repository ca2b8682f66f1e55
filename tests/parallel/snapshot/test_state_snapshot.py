"""A snapshot restores what a step may change: generators of any kind, and metrics."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.aggregation import CatMetric

from equipoise.parallel.snapshot.state_snapshot import StepSnapshot

CPU = [torch.device("cpu")]


@pytest.fixture(autouse=True)
def numpys_generator() -> Iterator[None]:
    before = np.random.get_bit_generator()
    yield
    np.random.set_bit_generator(before)


def draw() -> list[float]:
    """A number of every kind; normal ones are drawn in pairs, of which the second is kept."""
    return [
        float(torch.rand(())),
        float(torch.randn(())),
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
    ]


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64])
def test_numpys_generator_is_exchanged(kind: type) -> None:
    rewind = StepSnapshot(nn.Linear(1, 1), CPU)
    rewind.mark()
    np.random.set_bit_generator(own := kind(3))  # between two steps
    rewind.mark()
    first = draw()
    rewind.restore()
    assert draw() == first
    rewind.restore()
    np.random.set_bit_generator(np.random.MT19937(4))  # in a step that fails
    np.random.rand()
    rewind.restore()
    assert np.random.get_bit_generator() is own
    assert draw() == first


def test_states_of_metrics_are_restored() -> None:
    module = nn.ModuleDict({"mean": MeanMetric(), "all": CatMetric(), "both": MetricCollection([MeanMetric()])})
    rewind = StepSnapshot(module, CPU)
    for metric in module.values():
        metric.update(torch.tensor(1.0))
    rewind.mark()
    for _ in range(2):
        for metric in module.values():
            metric.update(torch.tensor(5.0))
        rewind.restore()
        assert module["mean"].compute() == 1
        assert module["all"].compute().tolist() == 1
        assert module["both"].compute() == {"MeanMetric": 1}
        assert module["mean"].update_count == 1


def test_the_use_of_a_number_that_was_drawn_in_advance_is_noticed() -> None:
    rewind = StepSnapshot(nn.Module(), CPU)
    for seed in (random.seed, np.random.seed):
        seed(7)
    for _ in range(2):  # the second time no generator moves
        random.gauss(0, 1)
        np.random.randn()
        rewind.mark()
    first = draw()
    rewind.restore()
    assert draw() == first


@pytest.mark.parametrize("count", [1, 623, 624, 625, 1248])
def test_any_number_of_draws_is_noticed(count: int) -> None:
    """After 624 words a twister's position is where it was."""
    random.seed(7)
    np.random.seed(7)
    rewind = StepSnapshot(nn.Module(), CPU)
    rewind.mark()
    for _ in range(count):
        random.getrandbits(32)
        np.random.randint(0, 2**32, dtype=np.uint32)
    rewind.mark()
    before = random.getstate(), np.random.get_state()
    random.random()
    np.random.rand()
    rewind.restore()
    assert random.getstate() == before[0]
    assert np.random.get_state()[2] == before[1][2]
    assert (np.random.get_state()[1] == before[1][1]).all()
