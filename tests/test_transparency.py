"""The first promise: however a batch is split, the gradients are those of one device on the whole batch.

Every strategy runs the same modules, in float64, as one device does; gradients before each step and weights after the
last must agree within 1e-12 of their own size.
"""

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise import BalancedDataParallelStrategy, DataParallelStrategy
from tests.support.networks.transparency import (
    Base,
    Convolution,
    Frozen,
    Manual,
    Masked,
    MaskedOnTheHost,
    Mlp,
    Recurrent,
    Tied,
)
from tests.support.one_device import OPTIONS, assert_same_run, on_one_device, train
from tests.support.pairs import pairwise

CHUNKS = [[6, 5], [2, 5, 4], [0, 6, 5], [1, 4, 3, 3]]

MODULES: list[type[Base]] = [Mlp, Convolution, Recurrent, Tied, Frozen, Masked, MaskedOnTheHost]


# Data parallel and the balanced split


@pytest.mark.quick_cases(9)
@pytest.mark.few_cases(7)
@pytest.mark.parametrize(("make", "parallelize", "chunks"), pairwise(MODULES, ["step", "forward"], CHUNKS))
def test_shares_of_a_batch_equal_one_device(make: type[Base], parallelize: Any, chunks: list[int]) -> None:
    if make is Frozen:  # its step calls no forward
        parallelize = "step"
    strategy = BalancedDataParallelStrategy(shares=chunks, parallelize=parallelize)
    assert_same_run(on_one_device(make), train(make, strategy, len(chunks)))


@pytest.mark.parametrize("options", [name for name in OPTIONS if OPTIONS[name]])
@pytest.mark.parametrize("make", [Mlp, Masked, MaskedOnTheHost], ids=lambda make: make.__name__)
def test_accumulated_and_clipped_shares_equal_one_device(make: type[Base], options: str) -> None:
    strategy = BalancedDataParallelStrategy(shares=[2, 5, 4])
    assert_same_run(on_one_device(make, **OPTIONS[options]), train(make, strategy, 3, **OPTIONS[options]))


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("devices", [1, 3, 13])
def test_data_parallel_equals_one_device(devices: int) -> None:
    assert_same_run(on_one_device(Recurrent), train(Recurrent, "dp", devices))


@pytest.mark.parametrize("chunks", CHUNKS[2:], ids=str)
def test_manual_optimization_equals_one_device(chunks: list[int]) -> None:
    strategy = BalancedDataParallelStrategy(shares=chunks, parallelize="forward")
    assert_same_run(on_one_device(Manual), train(Manual, strategy, len(chunks)))


@pytest.mark.parametrize("parallelize", ["step", "forward"])
@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-4), ("bf16-mixed", 0.1)])
def test_lower_precisions_equal_one_device_roughly(precision: str, tolerance: float, parallelize: Any) -> None:
    """As far as they go. Plain SGD: Adam would make differences of rounding as large as a gradient."""

    class Plain(Mlp):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    strategy = BalancedDataParallelStrategy(shares=[2, 5, 4], parallelize=parallelize)
    one = train(Plain, precision=precision)
    assert_same_run(one, train(Plain, strategy, 3, precision=precision), tolerance)


def test_a_whole_batch_that_is_masked_divides_nothing_by_zero() -> None:
    """Nothing is divided by zero; the other batches of the window make the step."""

    class Emptied(MaskedOnTheHost):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                batch = {**batch, "mask": torch.zeros_like(batch["mask"])}
            return super().training_step(batch, batch_idx)

    class EmptiedOnTheDevice(Emptied):
        def weight(self, weight: Tensor) -> Any:
            return weight

    for make in (Emptied, EmptiedOnTheDevice):
        one = train(make, accumulate_grad_batches=2)
        assert all(torch.isfinite(p).all() for p in one[0].parameters())
        assert_same_run(one, train(make, DataParallelStrategy(), 3, accumulate_grad_batches=2))


@pytest.mark.thorough
@settings(max_examples=8)
@given(st.data())
def test_any_shares_of_any_batches_equal_one_device(data: st.DataObject) -> None:
    devices = data.draw(st.integers(2, 5), label="devices")
    share = st.one_of(st.integers(0, 9), st.floats(0.01, 9))
    shares = data.draw(st.lists(share, min_size=devices, max_size=devices).filter(any), label="shares")
    sizes = data.draw(st.lists(st.integers(1, 14), min_size=1, max_size=4), label="sizes of batches")
    window = data.draw(st.integers(1, 3), label="window")
    make = data.draw(st.sampled_from([Mlp, Recurrent, Masked]), label="module")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = train(make, sizes=sizes, accumulate_grad_batches=window)
        strategy = BalancedDataParallelStrategy(shares=shares)
        assert_same_run(one, train(make, strategy, devices, sizes, accumulate_grad_batches=window))


def test_shares_that_change_in_mid_run_equal_one_device() -> None:
    class Change(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            strategy.shares = [[0, 1, 2], [5, 1, 1], [1, 1, 0]][batch_idx % 3]

    strategy = BalancedDataParallelStrategy(shares=[1, 1, 1])
    assert_same_run(on_one_device(Recurrent), train(Recurrent, strategy, 3, callbacks=[Change()]))
