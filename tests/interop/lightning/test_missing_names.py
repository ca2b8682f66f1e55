"""Runs without the private names of Lightning end as with them, or are refused with version and remedy."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from equipoise import ConfigurationError
from equipoise.interop.lightning.callbacks import (
    last_checkpoints,
    looks_after_training_epochs,
    with_average_begun,
    without_skipped_steps,
)
from equipoise.interop.lightning.checkpoint_hooks import hook_of_checkpoint
from equipoise.interop.metrics import load_metric_states, metric_states, take_metric_state
from tests.support.hidden_names import hide
from tests.support.trainer_runs import Data, Small, Validated, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")


class Measured(Validated):
    """Logs values and metrics, and has one hyperparameter, in one argument."""

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.save_hyperparameters(settings)
        self.mean = MeanMetric()
        self.both = MetricCollection({"sum": SumMetric(), "again": MeanMetric()})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.mean(loss)
        self.both(loss)
        self.log("mean", self.mean, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict(self.both, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


# Entries of a module's `__dict__`, which Equipoise finds there.
ENTRIES = ("_current_fx_name", "_metric_attributes", "_device", "_hparams_name", "_compiler_ctx")


class Renamed(Measured):
    """A module of a version that keeps its state elsewhere."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        for name in ENTRIES:
            vars(self).pop(name, None)

    @property
    def device(self) -> torch.device:
        return self.layer.weight.device


class DataWithSettings(Data):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"shuffled": False})


class Logging(L.Callback):
    def on_train_batch_end(self, run: Any, module: Any, *args: Any) -> None:
        self.log("three", 3.0)


def outcome(folder: Path, kind: Any = Measured) -> dict[str, Any]:
    """Fit, resume in the same folder, load and test; return all that a user sees of it."""

    def run(epochs: int) -> Any:
        return trainer(
            max_epochs=epochs,
            enable_checkpointing=True,
            logger=CSVLogger(folder, name="", version=""),
            callbacks=[
                Logging(),
                ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_last=True, save_top_k=2),
                EarlyStopping("val_loss", patience=5),
                LearningRateMonitor("step"),
            ],
            log_every_n_steps=1,
        )

    torch.manual_seed(1)
    first = run(2)
    first.fit(kind({"lr": 0.01}), datamodule=DataWithSettings())
    second = run(4)
    second.fit(kind({"lr": 0.01}), datamodule=DataWithSettings(), ckpt_path="last")
    last = second.checkpoint_callback.last_model_path
    loaded = kind.load_from_checkpoint(last)
    return {
        "weights": [value.tolist() for value in loaded.state_dict().values()],
        "hyperparameters": dict(loaded.hparams),
        "values": [{name: float(value) for name, value in each.callback_metrics.items()} for each in (first, second)],
        "rows": (folder / "metrics.csv").read_text(),
        "settings": (folder / "hparams.yaml").read_text(),
        "files": sorted(path.name for path in folder.iterdir()),
        "test": second.test(loaded, loader(), verbose=False),
    }


NAMES: dict[str, tuple[type, tuple[str, ...]]] = {
    "module": (LightningModule, ("_trainer", "_log_hyperparams")),
    "data module": (L.LightningDataModule, ("_log_hyperparams",)),
    "checkpoint": (
        ModelCheckpoint,
        (
            "_every_n_train_steps",
            "_train_time_interval",
            "_last_global_step_saved",
            "_last_checkpoint_saved",
            "_defer_save_until_validation",
        ),
    ),
    "csv": (CSVLogger, ("_experiment",)),
    "loaders": (CombinedLoader, ("_mode",)),
    "profiler": (PassThroughProfiler, ("_lightning_module",)),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome with all names."""
    return outcome(tmp_path_factory.mktemp("with"))


@pytest.mark.quick_cases(2)
@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_a_run_without_the_names_of_one_class(
    name: str, expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, names = NAMES[name]
    looked_for = hide(monkeypatch, kind, *names)
    assert outcome(tmp_path) == expected
    # Nothing asks for the mode of loaders that Equipoise itself has combined.
    assert looked_for == (set() if name == "loaders" else set(names))


def test_a_run_without_any_of_the_names(
    expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_for = {name: hide(monkeypatch, kind, *names) for name, (kind, names) in NAMES.items()}
    assert outcome(tmp_path / "without", Renamed) == expected
    assert looked_for == {name: set() if name == "loaders" else set(names) for name, (_, names) in NAMES.items()}


# Callbacks


@pytest.mark.parametrize("name", ["_monitor_candidates", "_save_last_checkpoint", "_should_remove_checkpoint"])
def test_a_checkpoint_callback_that_works_otherwise_is_called_as_it_is(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    callback = ModelCheckpoint(monitor="value")
    fit: Any = SimpleNamespace(later_files={"a.ckpt"})
    hook = callback.on_validation_end
    assert hook_of_checkpoint(callback, "on_validation_end", hook, fit) != hook
    monkeypatch.delattr(ModelCheckpoint, name)
    assert hook_of_checkpoint(callback, "on_validation_end", hook, fit) == hook


def test_averaging_that_notes_no_step_is_called_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    averaging = WeightAveraging()
    fit: Any = SimpleNamespace()
    hook = averaging.on_train_batch_end
    assert without_skipped_steps(averaging, "on_train_batch_end", hook, fit) != hook
    hide(monkeypatch, WeightAveraging, "_latest_update_step")
    assert without_skipped_steps(averaging, "on_train_batch_end", hook, fit) == hook


def test_averaging_without_its_average_is_called_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    averaging = WeightAveraging()
    hide(monkeypatch, WeightAveraging, "_average_model")
    calls: list[Any] = []
    with_average_begun(averaging, "on_train_end", lambda *args: calls.append(args))("trainer", nn.Linear(1, 1))
    assert len(calls) == 1


def test_early_stopping_without_a_value_to_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's own error comes at the end of the epoch."""
    stopping = EarlyStopping("gone", check_on_train_epoch_end=True)
    with pytest.raises(RuntimeError, match="monitors 'gone', but no such value was logged"):
        trainer(callbacks=[copy.copy(stopping)]).fit(Small(), loader())
    assert looks_after_training_epochs(stopping)
    hide(monkeypatch, EarlyStopping, "_check_on_train_epoch_end")
    with pytest.raises(RuntimeError, match="conditioned on metric `gone`"):
        trainer(callbacks=[stopping]).fit(Small(), loader())


@pytest.mark.parametrize("with_logger", [False, True])
def test_the_folder_of_last_checkpoints_that_the_trainer_chooses(with_logger: bool, tmp_path: Path) -> None:
    """The files are those that Lightning finds."""

    def make() -> tuple[Any, ModelCheckpoint]:
        keeper = ModelCheckpoint(save_last=True)
        logger = CSVLogger(tmp_path, name="run", version=3) if with_logger else False
        return trainer(callbacks=[keeper], enable_checkpointing=True, logger=logger, default_root_dir=tmp_path), keeper

    run, keeper = make()
    run.fit(Small(), loader())
    written = Path(keeper.last_model_path)
    (written.parent / "last-v1.ckpt").touch()
    (written.parent / "latest.ckpt").touch()
    (written.parent / "last.txt").touch()
    later, keeper = make()
    expected = {str(written), str(written.parent / "last-v1.ckpt")}
    assert last_checkpoints(keeper, later) == expected == keeper._find_last_checkpoints(later)
    assert keeper.dirpath is None


# What is refused


def test_a_combined_loader_whose_mode_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, CombinedLoader, "_mode")
    with pytest.raises(ConfigurationError, match=r"CombinedLoader._mode.*Pass the loaders as a dictionary or a list"):
        trainer().fit(Small(), CombinedLoader([loader(), loader()], "min_size"))


def test_a_metric_whose_state_is_unknown() -> None:
    metric = SumMetric()
    states = metric_states(metric)
    del vars(metric)["_computed"]
    refusal = r"^A metric in copies.* does not work with torchmetrics .* lacks Metric\._computed\..*another strategy"
    for use in (take_metric_state, lambda metric: load_metric_states(metric, states)):
        with pytest.raises(ConfigurationError, match=refusal):
            use(metric)


def test_hyperparameters_that_contradict_each_other(tmp_path: Path) -> None:
    def fit(of_data: Any, logger: bool = True) -> Any:
        data = Data()
        data.save_hyperparameters(of_data, logger=logger)
        run = trainer(logger=CSVLogger(tmp_path))
        run.fit(Measured({"lr": 0.01, "layers": 2}), datamodule=data)
        return run.logger.experiment.hparams

    assert fit({"lr": 0.01, "size": 3}) == {"lr": 0.01, "layers": 2, "size": 3}
    assert fit({"lr": 5.0}, logger=False) == {"lr": 0.01, "layers": 2}
    with pytest.raises(RuntimeError, match=r"both have the hyperparameters \['lr'\], with different values"):
        fit({"lr": 5.0, "layers": 2})
