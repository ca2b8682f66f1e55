"""Fused optimisers: chosen where torch has them, the same steps within rounding, and resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.utils.data import DataLoader, TensorDataset

from equipoise.interop.torch.optimizers import unscales_by_itself
from equipoise.trainer.optimization.configuration.fused_optimizers import fuse_optimizers
from tests.support.equality import assert_equal
from tests.support.trainer_runs import Small, trainer, with_optimizers

KINDS = {
    "SGD": lambda parameters: SGD(parameters, 0.1, momentum=0.9),
    "Adam": lambda parameters: Adam(parameters, 0.01),
    "AdamW": lambda parameters: AdamW(parameters, 0.01, weight_decay=0.1),
    "Adagrad": lambda parameters: Adagrad(parameters, 0.05),
}


class Watching(Small):
    """Sees the gradients before they are clipped."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.norms.append(float(nn.utils.get_total_norm(gradients)))


def fit(kind: str = "Adam", base: type[Small] = Small, ckpt_path: Path | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    module = with_optimizers(lambda m: KINDS[kind](m.parameters()), base)
    data = torch.randn(24, 2, generator=torch.Generator().manual_seed(1))
    run = trainer(**{"max_epochs": 2, "precision": "64-true", **options})
    run.fit(module, DataLoader(TensorDataset(data), 4), ckpt_path=ckpt_path)
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_fused_steps_equal_plain_ones(kind: str) -> None:
    fused = fit(kind, fused_optimizer=True, gradient_clip_val=0.1)
    group = fused.trainer.optimizers[0].param_groups[0]
    assert group["fused"] is True
    assert_equal(fit(kind, gradient_clip_val=0.1), fused, 1e-12)
    assert unscales_by_itself(fused.trainer.optimizers[0])


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("base", [Small, Watching])
def test_fused_steps_of_scaled_losses_equal_plain_ones(base: type[Small], clip: float | None) -> None:
    options: dict[str, Any] = {"precision": "16-mixed", "gradient_clip_val": clip}
    fused = fit(base=base, fused_optimizer=True, **options)
    plain = fit(base=base, **options)
    assert_equal(plain, fused, 1e-5)
    if base is Watching:
        assert fused.norms == pytest.approx(plain.norms, rel=1e-4)


@pytest.mark.parametrize(("fused_before", "fused"), [(True, True), (True, False), (False, True)])
def test_a_resumed_run_is_fused_as_it_says_itself(tmp_path: Path, fused_before: bool, fused: bool) -> None:
    whole = fit(fused_optimizer=fused)
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1)
    fit(fused_optimizer=fused_before, callbacks=[saves], enable_checkpointing=True, max_epochs=1)
    path = next(tmp_path.glob("*step=5*.ckpt"))
    with pytest.warns(UserWarning, match="states of callbacks that are missing"):
        resumed = fit(ckpt_path=path, fused_optimizer=fused)
    assert bool(resumed.trainer.optimizers[0].param_groups[0]["fused"]) is fused
    assert_equal(whole, resumed, 0.0 if fused_before is fused else 1e-12)


@pytest.mark.parametrize("strategy", ["dp", "balanced"])
def test_fused_steps_on_several_devices_equal_plain_ones_on_one(strategy: str) -> None:
    fused = fit(fused_optimizer=True, strategy=strategy, devices=["cpu", "cpu"])
    assert_equal(fit(), fused, 1e-12)


@pytest.mark.parametrize("option", [{"fused": False}, {"foreach": False}])
def test_the_choice_of_a_fused_form_by_the_user_stays(option: dict[str, bool]) -> None:
    module = Small()
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
        (RMSprop, Small(), "RMSprop: torch has no fused form of it"),
        (Own, Small(), "Own: it is not one of torch's own"),
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
