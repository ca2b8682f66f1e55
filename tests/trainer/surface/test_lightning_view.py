"""Lightning's objects find what they look for in a trainer."""

import re
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger

from equipoise import Trainer
from tests.support.trainer_runs import Data, Small, Validated, loader, trainer

LIGHTNING = Path(lightning.pytorch.__file__).parent
READERS = ("callbacks", "core", "loggers", "profilers", "utilities")
# `trainer.a.b`, `self.trainer.a.b` and the like, but not the modules of the package.
CHAIN = r"(?<!pytorch\.)(?<!trainer\.)\b_?trainer\.(\w+(?:\.\w+)*)"
NOT_READ = {
    "_active_loop",  # BatchSizeFinder
    "_model_registry",  # Lightning's own cloud
    "py",  # the name of a file
    "setter",  # a decorator
    "strategy.zero_stage_3",  # DeepSpeed
}


def test_attributes_that_lightnings_objects_read_are_there(tmp_path: Path) -> None:
    """Read from their source: every attribute of a trainer that a callback, a module or a logger names."""
    run = trainer(logger=CSVLogger(tmp_path), enable_checkpointing=True, default_root_dir=tmp_path)
    run.fit(Validated(), loader(), loader())
    files = [path for folder in READERS for path in (LIGHTNING / folder).rglob("*.py")]
    chains = set(re.findall(CHAIN, "\n".join(path.read_text(encoding="utf-8") for path in files)))
    assert {"callback_metrics", "strategy.broadcast", "fit_loop.max_epochs"} <= chains
    missing = set()
    for chain in chains:
        value: Any = run
        names = chain.split(".")
        for depth, name in enumerate(names, start=1):
            if not hasattr(value, name):
                missing.add(".".join(names[:depth]))
                break
            value = getattr(value, name)
            if value is None or callable(value) or isinstance(value, (int, float, str, list, dict)):
                break
    assert missing == NOT_READ


def test_the_throughput_monitor_works_in_every_kind_of_run(tmp_path: Path) -> None:
    """Of all callbacks it reads the most."""
    module = Validated()
    module.flops_per_batch = 6
    monitor = ThroughputMonitor(batch_size_fn=len, window_size=2)
    run = trainer(callbacks=[monitor], logger=CSVLogger(tmp_path), log_every_n_steps=1, num_sanity_val_steps=0)
    run.fit(module, loader(), loader())
    run.validate(module, loader(), verbose=False)
    run.test(module, loader(), verbose=False)
    run.predict(module, loader())
    (table,) = tmp_path.rglob("metrics.csv")
    columns = table.read_text().partition("\n")[0].split(",")
    assert {f"{stage}/device/batches_per_sec" for stage in ("train", "validate", "test", "predict")} <= set(columns)


class AsksForLoaders(Validated):
    """Chooses its scheduler by whether there is a validation loader, as estimators of forecasting libraries do."""

    def configure_optimizers(self) -> Any:
        loops = self.trainer.fit_loop
        self.sources = [loops.epoch_loop.val_loop._data_source, loops._data_source]
        self.answers = [(source.is_defined(), source.is_module()) for source in self.sources]
        return super().configure_optimizers()


class BringsLoaders(AsksForLoaders):
    def train_dataloader(self) -> Any:
        return loader()


@pytest.mark.parametrize("cls", [L.Trainer, Trainer], ids=["lightning", "ours"])
def test_sources_of_loaders_are_lightnings(cls: Any) -> None:
    passed = AsksForLoaders()
    trainer(cls).fit(passed, loader(), loader())
    assert passed.answers == [(True, False), (True, False)]
    own = BringsLoaders()
    trainer(cls, limit_val_batches=0).fit(own)
    assert own.answers == [(False, True), (True, True)]
    assert [source.instance is own for source in own.sources] == [True, True]
    assert [source.name for source in own.sources] == ["val_dataloader", "train_dataloader"]
    assert len(own.sources[1].dataloader()) == 3
    brought = AsksForLoaders()
    trainer(cls).fit(brought, datamodule=Data())
    assert brought.answers == [(True, True), (True, True)]


def test_sources_of_loaders_of_evaluations_are_known_in_their_run() -> None:
    run = trainer()
    assert not run.validate_loop._data_source.is_defined()
    run.validate(Validated(), loader(), verbose=False)
    assert run.validate_loop._data_source.is_defined()
    assert not run.test_loop._data_source.is_defined()
    assert not run.predict_loop._data_source.is_defined()


class NotesRestarts(Small):
    """Notes in each batch whether the run is completing a resumed epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.restarts = [*getattr(self, "restarts", []), self.trainer.fit_loop.restarting]


@pytest.mark.filterwarnings(
    "ignore:Be aware that when using `ckpt_path`", "ignore:The checkpoint holds states of callbacks"
)
@pytest.mark.parametrize("cls", [L.Trainer, Trainer], ids=["lightning", "ours"])
def test_a_resumed_epoch_is_a_restart(cls: Any, tmp_path: Path) -> None:
    run = trainer(cls, max_epochs=1)
    run.fit(NotesRestarts(), loader())
    assert run.model.restarts == [False] * 3
    saves = ModelCheckpoint(tmp_path, "second", every_n_train_steps=2)
    trainer(cls, max_epochs=1, enable_checkpointing=True, callbacks=[saves]).fit(Small(), loader())
    resumed = NotesRestarts()
    trainer(cls, max_epochs=2).fit(resumed, loader(), ckpt_path=tmp_path / "second.ckpt")
    assert resumed.restarts[0] is True
    assert resumed.restarts[1:] == [False] * 3
