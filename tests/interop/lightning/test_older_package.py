"""Modules, data modules, callbacks, loggers and plugins of `pytorch_lightning` run as those of `lightning.pytorch` do.

The two packages have the same sources, but the classes of one are no classes of the other.
"""

import copy
import types
from pathlib import Path
from typing import Any

import lightning.pytorch as newer
import lightning_utilities.core.rank_zero as rank_zero_module
import pytest
import torch
from torch import Tensor, nn

from equipoise import ConfigurationError, Trainer
from equipoise.interop.lightning.self_log import bind_log, has_own_log
from equipoise.strategies.ddp.exchange.native_engine import has_one_backward
from tests.support.equality import assert_equal
from tests.support.trainer_runs import Small, loader, refuses, refuses_fit, trainer

_LOG = rank_zero_module.log
older = pytest.importorskip("pytorch_lightning", exc_type=ImportError)
vars(rank_zero_module)["log"] = _LOG  # the import puts a logger of its own there, which other tests would miss
pytestmark = pytest.mark.filterwarnings("ignore:The checkpoint holds states of callbacks")
BOTH = pytest.mark.parametrize("package", [newer, older], ids=["lightning.pytorch", "pytorch_lightning"])
HOOKS = [name for name in dir(newer.Callback) if name.startswith("on_") or name in ("setup", "teardown")]


def module_of(package: types.ModuleType) -> Any:
    """Return a module whose base is that of the package."""

    class Module(package.LightningModule):
        loss, predict_step = Small.loss, Small.predict_step

        def __init__(self, width: int = 2) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer, self.ran = nn.Linear(width, 1), []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch))

        test_step = validation_step

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    torch.manual_seed(7)
    return Module()


def data_of(package: types.ModuleType) -> Any:
    methods = {f"{stage}_dataloader": lambda self: loader() for stage in ("train", "val", "test", "predict")}
    return type("Data", (package.LightningDataModule,), methods)()


def everything(package: types.ModuleType, folder: Path) -> dict[str, Any]:
    """Run all entry points with parts of a package, and return what can be compared."""
    seen: list[str] = []
    recorder = type(
        "Recorder",
        (package.Callback,),
        {name: (lambda self, *args, _name=name, **kwargs: seen.append(_name)) for name in HOOKS},
    )
    kept = package.callbacks.ModelCheckpoint(folder, monitor="val_loss", save_last=True)
    run = trainer(
        max_epochs=3,
        callbacks=[
            kept,
            recorder(),
            package.callbacks.EarlyStopping("val_loss", patience=5),
            package.callbacks.LearningRateMonitor("epoch"),
            package.callbacks.RichModelSummary(),
            package.callbacks.TQDMProgressBar(refresh_rate=0),
        ],
        logger=package.loggers.CSVLogger(folder, name="csv", version=0),
        log_every_n_steps=1,
        enable_checkpointing=True,
        enable_progress_bar=True,
        enable_model_summary=True,
    )
    module, data = module_of(package), data_of(package)
    run.fit(module, datamodule=data)
    again = trainer(max_epochs=5)
    again.fit(module_of(package), datamodule=data_of(package), ckpt_path=kept.last_model_path)
    loaded = type(module).load_from_checkpoint(kept.best_model_path)
    return {
        "weights": module,
        "resumed": again.lightning_module,
        "loaded": loaded,
        "hooks": seen,
        "test": run.test(module, datamodule=data, verbose=False),
        "predictions": run.predict(module, datamodule=data),
        "best": Path(kept.best_model_path).name,
        "rows": (folder / "csv" / "version_0" / "metrics.csv").read_text().splitlines(),
        "bound": "log" in vars(module),
        "wrapped": type(run.callbacks[-1]).__name__,
    }


@pytest.mark.thorough
def test_a_program_of_the_older_package(tmp_path: Path) -> None:
    assert_equal(everything(newer, tmp_path / "newer"), everything(older, tmp_path / "older"))


def test_objects_of_pytorch_lightning_and_of_lightning_in_one_run(tmp_path: Path) -> None:
    keeper = older.callbacks.ModelCheckpoint(tmp_path, filename="kept")
    run = trainer(
        callbacks=[keeper],
        enable_checkpointing=True,
        plugins=older.plugins.io.TorchCheckpointIO(),
        profiler=older.profilers.SimpleProfiler(),
    )
    loaders = older.utilities.CombinedLoader([loader(), loader()], "min_size")
    module = module_of(newer)
    module.loss = lambda batch: Small.loss(module, batch[0] if isinstance(batch[0], list) else batch)
    run.fit(module, loaders, loader())
    assert (tmp_path / "kept.ckpt").exists()
    assert run.checkpoint_callback is keeper


def test_only_one_of_each_kind_whatever_its_package() -> None:
    bars = [older.callbacks.TQDMProgressBar(), newer.callbacks.TQDMProgressBar()]
    refuses(lambda: Trainer(accelerator="cpu", callbacks=bars, logger=False), "one progress bar", "2")
    stop = older.callbacks.ModelCheckpoint()
    refuses(lambda: trainer(callbacks=[stop]), "enable_checkpointing=False")
    finder = type("Finder", (older.callbacks.BatchSizeFinder,), {})()
    refuses(lambda: trainer(callbacks=[finder]), "derived from BatchSizeFinder", "Instead")
    refuses_fit(older.LightningDataModule(), "takes a LightningModule")


@BOTH
def test_an_own_backward_is_recognised(package: types.ModuleType) -> None:
    module = module_of(package)
    own = type("Own", (type(module),), {"backward": lambda self, loss: loss.backward()})()
    assert has_one_backward(module)
    assert not has_one_backward(own)
    with pytest.raises(ConfigurationError, match="Own overrides `backward`"):
        trainer(devices=2, strategy="pipeline").fit(own, loader())


def test_pipeline_cuts_modules_of_the_older_package() -> None:
    module = module_of(older)
    module.layer = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    alone = copy.deepcopy(module)
    for one, strategy, devices in ((module, "pipeline", 2), (alone, "single_device", 1)):
        trainer(devices=devices, strategy=strategy, precision="64-true").fit(one, loader(), loader())
    assert_equal(alone, module, 1e-12)


@BOTH
def test_log_after_a_pickle_is_not_taken_for_one_of_the_user(package: types.ModuleType) -> None:
    module = module_of(package)
    bind_log(module, [])
    assert not has_own_log(module)
    module.log = types.MethodType(package.LightningModule.log, module)  # pickle restores a bound method by its name
    assert not has_own_log(module)
    module.log = print
    assert has_own_log(module)
