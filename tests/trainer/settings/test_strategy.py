"""Strategies from names and objects."""

import pytest
import torch

from equipoise import BalancedDataParallelStrategy, DataParallelStrategy, DDPStrategy, SingleDeviceStrategy, Strategy
from equipoise.trainer.settings.strategy import select_strategy
from tests.conftest import ignoring
from tests.support.trainer_runs import Small, loader, trainer

pytestmark = ignoring()
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["auto", "single_device"])
def test_a_strategy_by_name(name: str) -> None:
    strategy = select_strategy(name, [CPU], 1)
    assert type(strategy) is SingleDeviceStrategy
    assert strategy.devices == (CPU,)


def test_several_devices_of_one_model_and_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(DDPStrategy, "__init__", lambda self, shares=None: measured.append(shares))
    monkeypatch.setattr(DDPStrategy, "connect", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: ["slow", "fast", "fast"][device.index])
    cards = [torch.device("cuda", index) for index in range(3)]
    for devices in ([CPU, CPU], cards[1:], cards):
        assert type(select_strategy("auto", devices, 1)) is DDPStrategy
    assert measured == [None, None, "auto"]


def test_several_devices_where_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.trainer.settings.strategy.can_start_workers", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: ["slow", "fast", "fast"][device.index])
    cards = [torch.device("cuda", index) for index in range(3)]
    kinds = {1: SingleDeviceStrategy, 2: DataParallelStrategy, 3: BalancedDataParallelStrategy}
    for count, kind in kinds.items():
        assert type(select_strategy("auto", cards[-count:], 1)) is kind


def test_a_strategy_of_the_users_own() -> None:
    class Own(Strategy):
        name = "own"

    own = Own()
    assert select_strategy(own, [CPU, CPU], 1) is own
    assert own.devices == (CPU, CPU)
    run = trainer(strategy=Own(), devices=2)
    assert isinstance(run.strategy, Own)
    run.fit(Small(), loader())
    assert run.global_step == 3
