"""Shares by hand, as BalancedDataParallel's, and measured."""

from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise import BalancedDataParallelStrategy, ConfigurationError, SimulatedDevice
from equipoise.parallel.batches import calibration
from tests.strategies.replicated.sized_parts import Module, fit, loader, trainer
from tests.support.simulated_time import SimulatedTime

FAST, SLOW = SimulatedDevice(seconds_per_sample=0.0005), SimulatedDevice(seconds_per_sample=0.0015)


@pytest.fixture(autouse=True)
def simulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let parts take the time of simulated devices alone, whatever else the machine does."""
    monkeypatch.setattr(calibration, "time", SimulatedTime())


# By hand


@pytest.mark.parametrize(
    ("shares", "sizes"),
    [([0.5, 1.5], [8, 24]), ([0, 1], [32]), ((2, 1), [21, 11])],
)
def test_given_shares_cut_batches(shares: Any, sizes: list[int]) -> None:
    assert fit(BalancedDataParallelStrategy(shares=shares), loader(1)).sizes == sizes


def test_the_name_of_the_strategy_alone_measures_shares() -> None:
    run = trainer("balanced")
    assert run.connected_strategy.measures
    assert run.connected_strategy.shares is None


def test_first_device_batch_size_cuts_batches() -> None:
    strategy = BalancedDataParallelStrategy(first_device_batch_size=4)
    assert fit(strategy, loader(1, 16), 3).sizes == [4, 6, 6]
    with pytest.warns(UserWarning, match=r"first_device_batch_size=4 is too much for a batch of 8.*into \[3, 3, 2\]"):
        module = fit(BalancedDataParallelStrategy(first_device_batch_size=4), loader(2, 8), 3)
    assert module.sizes == [3, 3, 2] * 2
    assert fit(BalancedDataParallelStrategy(first_device_batch_size=0), loader(1, 9), 3).sizes == [5, 4]


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"shares": [1, 2, 3]}, 2, r"3 numbers, but there are 2 devices: (cpu, cpu|cuda:0, cuda:1)"),
    ({"shares": []}, 2, r"a number from 0 for each device.*not \[\]"),
    ({"shares": [0, 0]}, 2, r"not all of them 0.*not \[0, 0\]"),
    ({"shares": [1, float("nan")]}, 2, r"from 0.*nan"),
    ({"shares": "evenly"}, 2, r"'auto' or a number.*'evenly'"),
    ({"shares": [1, 1], "first_device_batch_size": 2}, 2, r"both say how batches are cut"),
    ({"first_device_batch_size": -1}, 2, r"a number of samples, from 0, not -1"),
    ({"first_device_batch_size": 2}, 1, r"there is one.*strategy='single_device'"),
    ({"shares": [1, 1], "simulated": {2: FAST}}, 2, r"simulated names the device 2, but there are 2"),
]


@pytest.mark.parametrize(("arguments", "devices", "message"), BAD)
def test_arguments_are_checked(arguments: dict[str, Any], devices: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        trainer(BalancedDataParallelStrategy(**arguments), devices)


def test_shares_are_checked_when_they_are_changed() -> None:
    strategy = BalancedDataParallelStrategy(shares=[1, 1])
    trainer(strategy)
    with pytest.raises(ConfigurationError, match="3 numbers"):
        strategy.shares = [1, 1, 1]
    strategy.shares = [1, 2]
    assert strategy.sizes(9) == [3, 6]


# Measured


def measured(*simulated: SimulatedDevice, **options: Any) -> BalancedDataParallelStrategy:
    return BalancedDataParallelStrategy(shares="auto", simulated=dict(enumerate(simulated)), **options)


def test_measured_shares_give_a_slow_device_less(caplog: pytest.LogCaptureFixture) -> None:
    strategy = measured(FAST, SLOW)
    with caplog.at_level("INFO"):
        module = fit(strategy)
    assert strategy.shares is not None
    fast, slow = strategy.sizes(32)
    assert (fast, slow) == (24, 8)
    assert f"shares={strategy.shares} pins them" in caplog.text
    assert sum(module.sizes) == 12 * 32
    assert module.sizes[-2:] == [fast, slow]


def test_a_part_that_is_too_large_runs_out_of_memory() -> None:
    strategy = BalancedDataParallelStrategy(shares=[1, 1], simulated={1: SimulatedDevice(most_samples=10)})
    with pytest.raises(torch.OutOfMemoryError, match="holds 10 samples, not 16") as caught:
        fit(strategy)
    assert caught.value.__notes__ == [f"This was part 2 of 2 of the batch, on {strategy.devices[1]}."]


def test_small_batches_are_cut_evenly_and_not_measured() -> None:
    strategy = measured(FAST, SLOW)
    assert fit(strategy, loader(12, 7)).sizes[:2] == [4, 3]
    assert strategy.shares is None


class CallsForward(Module):
    def forward(self, batch: Any) -> Any:
        return self.layer(batch)

    def loss(self, batch: Any) -> Any:
        return self(batch).square().mean()


def test_shares_are_measured_with_the_forward_alone() -> None:
    strategy = measured(FAST, SLOW, parallelize="forward")
    trainer(strategy).fit(CallsForward(), loader(), loader())
    assert strategy.sizes(32) == [24, 8]


def test_shares_are_measured_again_when_asked() -> None:
    strategy = measured(FAST, SLOW)
    run = trainer(strategy)
    run.fit(Module(), loader(), loader())
    strategy.simulated = {0: SLOW, 1: FAST}
    strategy.measure_again()
    run.fit_loop.max_epochs = 2
    run.fit(Module(), loader(), loader())
    assert strategy.sizes(32) == [8, 24]


def test_measuring_may_be_asked_for_at_any_time() -> None:
    strategy = measured(FAST, SLOW)
    strategy.measure_again()  # before there are devices
    fit(strategy, loader(4))  # ends while they are measured
    trainer(strategy, 3).fit(Module(), loader(), loader())
    assert strategy.shares is not None
    assert len(strategy.shares) == 3
    with pytest.raises(ConfigurationError, match="Only shares='auto' are measured"):
        BalancedDataParallelStrategy(first_device_batch_size=2).measure_again()


def test_measured_shares_are_saved(tmp_path: Path) -> None:
    path, (strategy, resumed, other) = tmp_path / "x.ckpt", (measured(FAST, SLOW), measured(SLOW, FAST), measured())
    run = trainer(strategy)
    run.fit(Module(), loader(), loader())
    run.save_checkpoint(path)
    assert torch.load(path, weights_only=True)["equipoise"]["strategy"] == {"shares": strategy.shares}

    module = Module()
    trainer(resumed, max_epochs=2).fit(module, loader(), loader(), ckpt_path=path)
    assert resumed.shares == strategy.shares
    assert module.sizes[24:] == strategy.sizes(32) * 12  # after the first epoch, whose sizes are resumed

    trainer(other, 3, max_epochs=2).fit(Module(), loader(), loader(), ckpt_path=path)
    assert len(other.shares or ()) == 3  # measured for these

    pinned = BalancedDataParallelStrategy(shares=[1, 1])
    trainer(pinned, max_epochs=2).fit(Module(), loader(), loader(), ckpt_path=path)
    assert pinned.shares == [1, 1]
