"""Gradients, learning rates and switches that a step by hand changes: the same in all parts, or refused."""

import gc
import weakref
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

from equipoise import BalancedDataParallelStrategy, Trainer, VirtualDevicesStrategy
from equipoise.errors import StepError
from tests.conftest import ignoring
from tests.extensions.virtual.test_strategy import Noisy
from tests.extensions.virtual.test_strategy import run as run_automatic
from tests.support.quiet import QUIET
from tests.support.trainer_runs import refuses

pytestmark = ignoring()


class Plain(L.LightningModule):
    """Gradient descent by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (features,) = batch
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.net(features).square().mean())
        self.change(features, optimizer)
        optimizer.step()

    def change(self, features: Tensor, optimizer: Any) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.05)


class ClippedByTorch(Plain):
    def change(self, features: Tensor, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class Halving(Plain):
    def change(self, features: Tensor, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5


class ScaledBySamples(Plain):
    def change(self, features: Tensor, optimizer: Any) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1 / (1 + features.abs().max()))


class SetBySamples(Plain):
    def change(self, features: Tensor, optimizer: Any) -> None:
        weight = self.net.weight
        (weight.grad,) = torch.autograd.grad(self.net(features).square().mean(), weight)


class RateBySamples(Plain):
    def change(self, features: Tensor, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 * float(features.abs().max())


class RateForTheNextStep(Plain):
    """Sets a learning rate when all steps of optimisers are done."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.param_groups[0]["lr"] = 0.01 * float(batch[0].abs().max())


class Thawed(Plain):
    """Parameters that were frozen when the step began."""

    def __init__(self) -> None:
        super().__init__()
        self.net.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.net.requires_grad_(True)
        optimizer.zero_grad()
        self.net(batch[0]).square().mean().backward()
        optimizer.step()
        self.net.requires_grad_(False)


class Switching(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        with sdpa_kernel(SDPBackend.MATH), torch.autograd.set_detect_anomaly(True):
            optimizer.zero_grad()
            self.manual_backward(self.net(batch[0]).square().mean())
            self.seen += [torch.backends.cuda.flash_sdp_enabled(), torch.is_anomaly_enabled()]
        optimizer.step()


class Alias(Plain):
    """An attribute that is a buffer."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(4))
        vars(self)["alias"] = self.table

    def change(self, features: Tensor, optimizer: Any) -> None:
        self.alias.add_(features.mean(0))


def fit(module: L.LightningModule, strategy: Any, **options: Any) -> None:
    draw = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(torch.randn(40, 4, generator=draw)), batch_size=8)
    options = {"max_epochs": 1, **QUIET, **options}
    Trainer(strategy=strategy, accelerator="cpu", devices=1, **options).fit(module, loader)


def trained(kind: type[Plain], strategy: Any) -> Plain:
    torch.manual_seed(1)
    module = kind()
    fit(module, strategy, precision="64-true")
    return module


@pytest.mark.parametrize("kind", [ClippedByTorch, Halving])
def test_as_on_one_device(kind: type[Plain]) -> None:
    module = trained(kind, VirtualDevicesStrategy(count=4))
    torch.testing.assert_close(module.net.weight, trained(kind, "single_device").net.weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (ScaledBySamples, "gradients that it has changed"),
        (SetBySamples, "gradients that it has changed"),
        (Thawed, "gradients that it has changed"),
        (RateBySamples, "lr of group 0"),
        (RateForTheNextStep, "ends its `training_step` with {'lr of group 0'"),
    ],
)
def test_what_depends_on_samples_is_refused(kind: type[Plain], text: str) -> None:
    with pytest.raises(StepError, match=text):
        trained(kind, VirtualDevicesStrategy(count=4))


@pytest.mark.parametrize("part", range(4))
def test_an_error_leaves_the_options_that_all_parts_had(part: int) -> None:
    class Fails(Plain):
        def change(self, features: Tensor, optimizer: Any) -> None:
            optimizer.param_groups[0]["lr"] = 1.0
            if features[0, 0] == 2 * part:
                raise KeyError("of the user")

    strategy = VirtualDevicesStrategy(count=4)
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, **QUIET)
    features = torch.arange(8.0)[:, None].expand(8, 4)
    with pytest.raises(KeyError):
        trainer.fit(Fails(), DataLoader(TensorDataset(features), batch_size=8))
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.05


def test_switches_belong_to_a_part() -> None:
    module = trained(Switching, VirtualDevicesStrategy(count=4))
    assert module.seen == [False, True] * 20
    assert torch.backends.cuda.flash_sdp_enabled()
    assert not torch.is_anomaly_enabled()


def test_attributes_that_are_buffers() -> None:
    """Statistics are those of the first part, two of eight samples."""
    module = Alias()
    fit(module, VirtualDevicesStrategy(count=4))
    draw = torch.Generator().manual_seed(3)
    features = torch.randn(40, 4, generator=draw)
    assert module.alias is module.table
    torch.testing.assert_close(module.table, features.unflatten(0, (5, 8))[:, :2].mean(1).sum(0))


class Automatic(Noisy):
    factor = 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = group["lr"] * self.factor
        return super().training_step(batch, batch_idx)


class Unchanged(Automatic):
    factor = 1.0


def test_learning_rates_in_automatic_optimisation() -> None:
    run_automatic(Unchanged, 1, count=2)
    with pytest.raises(StepError, match="changes 'lr' of an optimiser"):
        run_automatic(Automatic, 1, count=2)


def test_the_strategy_keeps_no_module() -> None:
    strategy = VirtualDevicesStrategy(count=4)
    module = Plain()
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
        run_with_two(strategy, Sharing())
        assert strategy.shares == [1, 3]


def run_with_two(strategy: Any, callback: L.Callback) -> None:
    class Automatically(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = True

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch[0]).square().mean()

    loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=8)
    trainer = Trainer(strategy=strategy, devices=["cpu"] * 2, max_epochs=1, **{**QUIET, "callbacks": [callback]})
    trainer.fit(Automatically(), loader)


def test_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses(lambda: VirtualDevicesStrategy(one_process="false"), "one_process must be True or False")  # type: ignore[arg-type]
    values = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"}
    for name, value in {**values, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
        monkeypatch.setenv(name, value)
    strategy = VirtualDevicesStrategy(one_process=True)
    refuses(lambda: strategy.connect([torch.device("cpu")] * 2, 2), "a launcher has started 2")
