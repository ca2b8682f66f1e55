"""Options of the strategy and of optimisers, and modules that are refused."""

import gc
import weakref
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import BalancedDataParallelStrategy, Trainer, VirtualDevicesStrategy
from equipoise.errors import StepError
from tests.extensions.virtual.test_strategy import Noisy, run
from tests.support.quiet import QUIET
from tests.support.trainer_runs import refuses


class Linear(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.05)


def fit(module: L.LightningModule, strategy: Any, *, devices: int = 1, **options: Any) -> None:
    loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=8)
    options = {"max_epochs": 1, **QUIET, **options}
    Trainer(strategy=strategy, accelerator="cpu", devices=devices, **options).fit(module, loader)


def test_manual_optimisation_is_refused() -> None:
    module = Linear()
    module.automatic_optimization = False
    for strategy in (VirtualDevicesStrategy(count=2), VirtualDevicesStrategy(count=2, one_process=True)):
        refuses(lambda strategy=strategy: fit(module, strategy), "Linear optimises by hand", "strategy='ddp'")


class Automatic(Noisy):
    factor = 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = group["lr"] * self.factor
        return super().training_step(batch, batch_idx)


class Unchanged(Automatic):
    factor = 1.0


def test_learning_rates_in_automatic_optimisation() -> None:
    run(Unchanged, 1, count=2)
    with pytest.raises(StepError, match="changes 'lr' of an optimiser"):
        run(Automatic, 1, count=2)


def test_the_strategy_keeps_no_module() -> None:
    strategy = VirtualDevicesStrategy(count=4)
    module = Linear()
    fit(module, strategy)
    reference = weakref.ref(module)
    del module
    gc.collect()
    assert reference() is None


def test_shares_are_set_by_callbacks() -> None:
    class Sharing(L.Callback):
        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            trainer.strategy.shares = [1, 3]

    for strategy in (VirtualDevicesStrategy(count=4, one_process=True), BalancedDataParallelStrategy(shares=[1, 1])):
        fit(Linear(), strategy, devices=2, callbacks=[Sharing()])
        assert strategy.shares == [1, 3]


def test_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses(lambda: VirtualDevicesStrategy(one_process="false"), "one_process must be True or False")  # type: ignore[arg-type]
    values = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"}
    for name, value in {**values, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
        monkeypatch.setenv(name, value)
    strategy = VirtualDevicesStrategy(one_process=True)
    refuses(lambda: strategy.connect([torch.device("cpu")] * 2, 2), "a launcher has started 2")
