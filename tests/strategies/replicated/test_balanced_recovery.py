"""A device that runs out of memory receives fewer samples from then on; the step at hand is done again exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from equipoise import BalancedDataParallelStrategy, Callback, OOMRecovery, SimulatedDevice
from tests.strategies.replicated.sized_parts import Module, loader, trainer
from tests.support.networks.transparency import Base, Masked, Mlp
from tests.support.one_device import assert_same_run, on_one_device, train

pytestmark = [
    pytest.mark.filterwarnings(
        r"ignore:Batch \d+ of \d+ samples",
        "ignore:.* ran out of memory and receives fewer samples",
        "ignore:Measuring continues",
    ),
    pytest.mark.usefixtures("quick_collections"),
]

# The second device, also where tests run on others than the CPU. One of several of the same name has a number.
SECOND = r"(cpu \(number 1\)|cuda:1)"


def limited(most: int, index: int = 1, **options: Any) -> BalancedDataParallelStrategy:
    """A strategy of which one device holds so many samples."""
    return BalancedDataParallelStrategy(simulated={index: SimulatedDevice(most_samples=most)}, **options)


def fit(strategy: Any, batches: int = 12, devices: int = 2) -> tuple[Module, OOMRecovery]:
    module, recovery = Module(), OOMRecovery(grow_after=1)
    trainer(strategy, devices, callbacks=[recovery]).fit(module, loader(batches), loader())
    return module, recovery


def test_the_share_of_a_device_shrinks_until_batches_fit() -> None:
    """Of 32 samples the second device holds 10: 16, 14 and 12 are too many, 9 fit."""
    strategy = limited(10, shares=[1, 1])
    with pytest.warns(
        UserWarning, match=rf"{SECOND} ran out of memory and receives fewer samples .*: shares=\[1, 0\.75\]"
    ):
        module, recovery = fit(strategy)
    assert len(recovery.events) == 3
    assert strategy.shares == [1, 0.422]
    assert module.sizes[-2:] == [23, 9]


@pytest.mark.parametrize("index", [0, 2])
def test_the_device_that_ran_out_of_memory_is_known(index: int) -> None:
    """Also where all devices have the same name."""
    strategy = limited(9, index, shares=[4, 4, 4])
    fit(strategy, 1, 3)
    assert strategy.shares == [3 if each == index else 4 for each in range(3)]


@pytest.mark.parametrize(("make", "window"), [(Mlp, 3), (Masked, 1)])
def test_gradients_are_those_of_one_device(make: type[Base], window: int) -> None:
    strategy, options = limited(2, shares=[1, 2, 1]), {"max_epochs": 3, "accumulate_grad_batches": window}
    many = train(make, strategy, 3, callbacks=[OOMRecovery(grow_after=1)], **options)
    assert_same_run(on_one_device(make, **options), many)
    assert strategy.shares is not None
    assert strategy.shares[1] < 2


def test_a_given_size_of_the_first_device_is_replaced() -> None:
    strategy = BalancedDataParallelStrategy(first_device_batch_size=8, simulated={0: SimulatedDevice(most_samples=7)})
    module, recovery = fit(strategy)
    assert strategy.shares == [6, 24]
    assert module.sizes[-2:] == [6, 26]
    assert len(recovery.events) == 1


@pytest.mark.filterwarnings("ignore:The loss is inf")
def test_a_size_that_did_not_fit_limits_the_measurement() -> None:
    class Late(Module):
        """Its second part does not fit if it is larger than 10."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch) > 10 and float(batch[0, 0]) > 50:
                raise torch.OutOfMemoryError("injected")
            return super().training_step(batch, batch_idx)

    batches = [torch.cat((torch.zeros(16, 2), torch.full((16, 2), 99.0))) for _ in range(16)]
    strategy, recovery = BalancedDataParallelStrategy(), OOMRecovery()
    with pytest.warns(UserWarning, match=rf"Measuring continues with at most 12 samples for {SECOND}"):
        trainer(strategy, callbacks=[recovery]).fit(Late(), DataLoader(batches, batch_size=None))
    assert strategy.shares is not None
    assert recovery.events


def test_a_share_stays_above_nothing() -> None:
    class Never(Callback):
        def on_out_of_memory(self, trainer: Any, pl_module: Any, event: Any) -> int:
            return 0

    strategy = limited(0, shares=[1, 1])
    trainer(strategy, callbacks=[Never()]).fit(Module(), loader(40), loader())
    assert strategy.shares is not None
    assert 0.01 < strategy.shares[1] < 0.02
    assert strategy.sizes(32) == [32, 0]


class FailsInValidation(Module):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch) > 4:
            raise torch.OutOfMemoryError("injected")


def test_evaluations_change_no_shares() -> None:
    strategy = BalancedDataParallelStrategy(shares=[1, 1])
    run = trainer(strategy, callbacks=[OOMRecovery()], limit_val_batches=1)
    run.validate(FailsInValidation(), loader(), verbose=False)
    assert strategy.shares == [1, 1]


def test_reduced_shares_are_saved(tmp_path: Path) -> None:
    strategy, path = limited(10, shares=[1, 1]), tmp_path / "x.ckpt"
    run = trainer(strategy, callbacks=[OOMRecovery(grow_after=1)])
    run.fit(Module(), loader(), loader())
    run.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["equipoise"]["strategy"]
    assert saved == {"shares": strategy.shares, "instead_of": [1, 1]}
    for given, expected in (([1, 1], strategy.shares), ([1, 2], [1, 2])):
        resumed = BalancedDataParallelStrategy(shares=given)
        trainer(resumed, max_epochs=2).fit(Module(), loader(), loader(), ckpt_path=path)
        assert resumed.shares == expected
    strategy.connect([torch.device("cpu")] * 2)
    assert strategy.shares == saved["shares"]  # for a second run
    strategy.shares = [2, 3]
    assert strategy.portable.strategy_state() == {}
