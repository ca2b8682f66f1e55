"""Fused optimisers: chosen where torch has them, the same steps within rounding, and resumed."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.utils.data import DataLoader, TensorDataset

from equipoise.interop.torch.optimizers import unscales_by_itself
from equipoise.trainer.optimization.configuration.fused_optimizers import fuse_optimizers
from tests.support.equality import assert_equal
from tests.support.trainer_runs import trainer

KINDS = {
    "SGD": lambda parameters: SGD(parameters, 0.1, momentum=0.9),
    "Adam": lambda parameters: Adam(parameters, 0.01),
    "AdamW": lambda parameters: AdamW(parameters, 0.01, weight_decay=0.1),
    "Adagrad": lambda parameters: Adagrad(parameters, 0.05),
}


class Module(L.LightningModule):
    """A regression.

    Args:
        kind: The optimiser.
    """

    def __init__(self, kind: str = "Adam") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.kind = kind
        self.norms: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        features = batch[0].to(self.net[0].weight.dtype)
        return self.net(features).float().square().mean()

    def configure_optimizers(self) -> Optimizer:
        return KINDS[self.kind](self.parameters())


class Watching(Module):
    """Sees the gradients before they are clipped."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.norms.append(float(nn.utils.get_total_norm(gradients)))


def fit(module: Module, ckpt_path: Path | None = None, **options: Any) -> Module:
    data = torch.randn(24, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    run = trainer(**{"max_epochs": 2, "precision": "64-true", **options})
    run.fit(module, DataLoader(TensorDataset(data), 4), ckpt_path=ckpt_path)
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_fused_steps_equal_plain_ones(kind: str) -> None:
    fused = fit(Module(kind), fused_optimizer=True, gradient_clip_val=0.1)
    group = fused.trainer.optimizers[0].param_groups[0]
    assert group["fused"] is True
    assert_equal(fit(Module(kind), gradient_clip_val=0.1), fused, 1e-12)
    assert unscales_by_itself(fused.trainer.optimizers[0])


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("make", [Module, Watching])
def test_fused_steps_of_scaled_losses_equal_plain_ones(make: type[Module], clip: float | None) -> None:
    options = {"precision": "16-mixed", "gradient_clip_val": clip}
    fused = fit(make(), fused_optimizer=True, **options)
    plain = fit(make(), **options)
    assert_equal(plain, fused, 1e-5)
    assert fused.norms == pytest.approx(plain.norms, rel=1e-4)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("fused_before", [True, False])
def test_a_resumed_run_is_fused_as_it_says_itself(tmp_path: Path, fused_before: bool, fused: bool) -> None:
    """The present choice holds."""
    whole = fit(Module(), fused_optimizer=fused)
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1)
    fit(Module(), fused_optimizer=fused_before, callbacks=[saves], enable_checkpointing=True, max_epochs=1)
    path = next(tmp_path.glob("*step=5*.ckpt"))
    with pytest.warns(UserWarning, match="states of callbacks that are missing"):
        resumed = fit(Module(), path, fused_optimizer=fused)
    assert bool(resumed.trainer.optimizers[0].param_groups[0]["fused"]) is fused
    assert_equal(whole, resumed, 0.0 if fused_before is fused else 1e-12)


@pytest.mark.parametrize("strategy", ["dp", "balanced", "pipeline"])
def test_fused_steps_on_several_devices_equal_plain_ones_on_one(strategy: str) -> None:
    fused = fit(Module(), fused_optimizer=True, strategy=strategy, devices=["cpu", "cpu"])
    assert_equal(fit(Module()), fused, 1e-12)


@pytest.mark.parametrize("option", [{"fused": False}, {"foreach": True}, {"foreach": False}])
def test_the_choice_of_a_fused_form_by_the_user_stays(option: dict[str, bool]) -> None:
    module = Module()
    optimizer = Adam(module.parameters(), **option)
    fuse_optimizers([optimizer], module)
    assert optimizer.param_groups[0]["fused"] is option.get("fused")


class Own(Adam):
    """An optimiser of the user."""


class Looked(nn.Module):
    """Sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2, sparse=True)


@pytest.mark.parametrize(
    ("make", "module", "reason"),
    [
        (LBFGS, Module(), "LBFGS: torch has no fused form of it"),
        (RMSprop, Module(), "RMSprop: torch has no fused form of it"),
        (Own, Module(), "Own: it is not one of torch's own"),
        (SGD, Looked(), "SGD: the gradients of table are sparse"),
        (Adam, nn.Linear(2, 2, device="meta"), "Adam: torch has no fused form for the device meta"),
        (Adam, nn.Linear(2, 2, dtype=torch.complex64), "Adam: a parameter has the dtype torch.complex64"),
    ],
)
def test_optimisers_without_a_fused_form_are_named(make: Any, module: nn.Module, reason: str) -> None:
    optimizer = make(module.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=f"fused_optimizer=True has no effect on {reason}"):
        fuse_optimizers([optimizer], module)
    assert not optimizer.param_groups[0].get("fused")
