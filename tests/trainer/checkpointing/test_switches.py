"""Switches of a module that callbacks turn are resumed: which parameters are trained, modes of submodules."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.trainer_runs import trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:The checkpoint holds states of callbacks", "ignore:.*provided params to be frozen"
)

EPOCHS = 4


class Finetuned(L.LightningModule):
    """A backbone with statistics, and a head."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.backbone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()).double()
        self.head = nn.Linear(4, 1).double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.backbone(batch[0])).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9)


class AllOptimized(Finetuned):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class WithStatistics(BaseFinetuning):
    """Freezes the statistics, too, until the second epoch."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.01)


class Thawing(L.Callback):
    """Freezes when training starts, thaws in the second epoch, and freezes statistics from the third on."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.backbone.requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.backbone.requires_grad_(True)
        if trainer.current_epoch == 2:
            pl_module.backbone.eval()


def finetuning() -> L.Callback:
    return BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.005)


KINDS: dict[str, tuple[Any, Any]] = {
    "backbone": (finetuning, Finetuned),
    "statistics": (WithStatistics, Finetuned),
    "own": (Thawing, AllOptimized),
}


def fit(kind: str, folder: Path, ckpt_path: Path | None = None, strategy: str = "auto", devices: int = 1) -> Finetuned:
    make, module_class = KINDS[kind]
    keepers: list[L.Callback] = [
        ModelCheckpoint(folder, "step-{step}", every_n_train_steps=1, save_top_k=-1),
        ModelCheckpoint(folder, "validated-{step}", "value", save_top_k=-1),
    ]
    if ckpt_path is not None:
        keepers = []
    features = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(8, 3)
    module: Finetuned = module_class()
    run = trainer(
        max_epochs=EPOCHS,
        callbacks=[make(), *keepers],
        enable_checkpointing=bool(keepers),
        strategy=strategy,
        devices=devices,
        num_sanity_val_steps=0,
    )
    run.fit(
        module,
        DataLoader(TensorDataset(features), batch_size=4),
        DataLoader(TensorDataset(features)),
        ckpt_path=ckpt_path,
    )
    return module


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for name, value in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=0, atol=1e-13)
    assert [p.requires_grad for p in one.parameters()] == [p.requires_grad for p in other.parameters()]
    assert [part.training for part in one.modules()] == [part.training for part in other.modules()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_with_what_a_callback_had_turned(tmp_path: Path, kind: str) -> None:
    expected = fit(kind, tmp_path)
    files = sorted(tmp_path.glob("*.ckpt"))
    assert len(files) == EPOCHS * 3
    for path in files:
        assert_same(expected, fit(kind, tmp_path, path))


@pytest.mark.parametrize("strategy", ["dp", "ddp_spawn"])
@pytest.mark.parametrize("kind", ["backbone", "own"])
@pytest.mark.quick_cases(1)
def test_on_several_devices(tmp_path: Path, kind: str, strategy: str) -> None:
    expected = fit(kind, tmp_path, strategy=strategy, devices=2)
    files = sorted(tmp_path.glob("*.ckpt"))
    assert len(files) >= EPOCHS
    for path in files[1::3]:
        assert_same(expected, fit(kind, tmp_path, path, strategy=strategy, devices=2))


def test_what_the_program_sets_before_training_is_no_matter_of_the_checkpoint(tmp_path: Path) -> None:
    """A user may freeze a part in the run that continues."""
    module = AllOptimized()
    first = trainer(max_epochs=1)
    data = DataLoader(TensorDataset(torch.ones(4, 3, dtype=torch.float64)), batch_size=2)
    first.fit(module, data)
    first.save_checkpoint(tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["equipoise"]["switches"] == {}
    frozen = AllOptimized()
    frozen.backbone.requires_grad_(False)
    trainer(max_epochs=2).fit(frozen, data, ckpt_path=tmp_path / "a.ckpt")
    assert not any(parameter.requires_grad for parameter in frozen.backbone.parameters())


class TwoOptimizers(AllOptimized):
    """Fails while only the head is switched on, once."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.fails = fails

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            if self.fails and self.current_epoch == 1:
                raise ArithmeticError("as asked")
            loss = self.head(self.backbone(batch[0])).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.head, self.backbone)]


def test_what_is_switched_off_for_a_moment_is_on_in_the_run_that_goes_on(tmp_path: Path) -> None:
    data = DataLoader(TensorDataset(torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)), batch_size=2)
    expected = TwoOptimizers(fails=False)
    trainer(max_epochs=3).fit(expected, data)
    keeper = ModelCheckpoint(tmp_path, "failed", save_on_exception=True, save_top_k=0)
    with pytest.raises(ArithmeticError):
        trainer(max_epochs=3, callbacks=[keeper], enable_checkpointing=True).fit(TwoOptimizers(fails=True), data)
    resumed = TwoOptimizers(fails=False)
    trainer(max_epochs=3).fit(resumed, data, ckpt_path=tmp_path / "failed.ckpt")
    assert_same(expected, resumed)
