"""Switches of a module that callbacks turn are resumed: which parameters are trained, modes of submodules."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.equality import assert_equal
from tests.support.resumption import assert_resumes
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


def features() -> DataLoader[Any]:
    """Two batches."""
    return DataLoader(TensorDataset(torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(8, 3)), batch_size=4)


def switches_of(module: nn.Module) -> Any:
    return [p.requires_grad for p in module.parameters()], [part.training for part in module.modules()]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "strategy", "devices"),
    [
        *((kind, "auto", 1) for kind in KINDS),
        ("own", "dp", 2),
        pytest.param("backbone", "ddp_spawn", 2, marks=pytest.mark.slow),
    ],
)
def test_requires_grad_and_modes_that_a_callback_has_changed_come_back_in_a_resumed_run(
    kind: str, strategy: str, devices: int, tmp_path: Path
) -> None:
    make, module_class = KINDS[kind]

    def run(callbacks: list[Any], path: Path | None) -> Any:
        module = module_class()
        options: dict[str, Any] = {"strategy": strategy, "devices": devices, "num_sanity_val_steps": 0}
        run = trainer(max_epochs=EPOCHS, callbacks=[make(), *callbacks], **options)
        run.fit(module, features(), features(), ckpt_path=path)
        return module, switches_of(module)

    place = None if devices == 1 else 1
    assert_resumes(run, tmp_path, ["on_train_batch_end", "on_validation_end"], first_epoch=place)


def test_what_the_program_sets_before_training_is_no_matter_of_the_checkpoint(tmp_path: Path) -> None:
    """A user may freeze a part in the run that continues."""
    module = AllOptimized()
    first = trainer(max_epochs=1)
    first.fit(module, features())
    first.save_checkpoint(tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["equipoise"]["switches"] == {}
    frozen = AllOptimized()
    frozen.backbone.requires_grad_(False)
    trainer(max_epochs=2).fit(frozen, features(), ckpt_path=tmp_path / "a.ckpt")
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
    expected = TwoOptimizers(fails=False)
    trainer(max_epochs=3).fit(expected, features())
    keeper = ModelCheckpoint(tmp_path, "failed", save_on_exception=True, save_top_k=0)
    with pytest.raises(ArithmeticError):
        trainer(max_epochs=3, callbacks=[keeper], enable_checkpointing=True).fit(TwoOptimizers(fails=True), features())
    resumed = TwoOptimizers(fails=False)
    trainer(max_epochs=3).fit(resumed, features(), ckpt_path=tmp_path / "failed.ckpt")
    assert_equal((expected, switches_of(expected)), (resumed, switches_of(resumed)))
