"""Users, callbacks and modules read the same from a trainer as from Lightning's, before, in and after every run."""

import inspect
import math
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerState
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import Trainer
from equipoise.trainer.surface.state_fields import StateField
from tests.support.equality import assert_equal
from tests.support.trainer_runs import Small, Stream, Validated, loader, trainer

BOTH = pytest.mark.parametrize("cls", [L.Trainer, Trainer], ids=["lightning", "ours"])

STAGES = ["training", "validating", "testing", "predicting", "sanity_checking"]
VIEWS = {"accelerator", "fit_loop", "precision_plugin", "predict_loop", "strategy", "test_loop", "validate_loop"}


def names(cls: Any) -> set[str]:
    """The public attributes of a trainer, and its properties."""
    properties = {name for name, value in inspect.getmembers(cls) if isinstance(value, property | StateField)}
    return {name for name in properties | set(vars(trainer(cls))) if not name.startswith("_")}


def test_what_can_be_read_of_lightnings_can_be_read_of_ours() -> None:
    assert names(L.Trainer) <= names(Trainer)
    assert names(Trainer) >= VIEWS


# The views are tested where they are made, and the estimate, which asks for loaders, below.
@cache
def readable_names() -> list[str]:
    return sorted(names(L.Trainer) - VIEWS - {"estimated_stepping_batches"})


Reading = dict[str, Any]


def plain(value: Any) -> Any:
    """Return a value that can be compared: an object equals every other of its class."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, DataLoader):
        return f"a loader of {len(value)}"
    if isinstance(value, TrainerState):
        return plain({name: getattr(part, "value", None) for name, part in vars(value).items()})
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def read(run: Any, where: str) -> tuple[str, Reading]:
    return where, {name: plain(getattr(run, name)) for name in readable_names()}


class Reads(Validated):
    """Has weights of 0.5; in a subclass, reads everything in its hooks and steps."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.constant_(self.layer.weight, 0.5)
        nn.init.constant_(self.layer.bias, 0.5)
        self.readings: list[tuple[str, Reading]] = []


def _reading(name: str) -> Any:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.readings.append(read(self.trainer, name))
        return getattr(super(ReadsEverywhere, self), name)(*args, **kwargs)

    return hook


HOOKS = [
    "setup",
    "configure_optimizers",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "training_step",
    "on_train_batch_end",
    "on_validation_epoch_start",
    "validation_step",
    "on_validation_end",
    "test_step",
    "predict_step",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
]
ReadsEverywhere = type("Reads", (Reads,), {name: _reading(name) for name in HOOKS})


def everything(cls: Any, **options: Any) -> list[tuple[str, Reading]]:
    """All that is read before, in and after a fit, a validation, a test and a prediction."""
    module, run = ReadsEverywhere(), trainer(cls, **options)
    module.readings.append(read(run, "before"))
    runs = {
        "fit": lambda: run.fit(module, loader(4), loader(3)),
        "validate": lambda: run.validate(module, [loader(1), loader(2)], verbose=False),
        "test": lambda: run.test(module, loader(2), verbose=False),
        "predict": lambda: run.predict(module, loader(4)),
    }
    for name, call in runs.items():
        call()
        module.readings.append(read(run, f"after {name}"))
    return module.readings


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "validation in mid-epoch": {"max_epochs": 2, "val_check_interval": 2, "accumulate_grad_batches": 2},
    "limits": {
        "limit_train_batches": 0.7,  # 2 of 4: a fraction is rounded down
        "limit_val_batches": 1,
        "limit_test_batches": 0.5,
        "limit_predict_batches": 2.0,  # a number of batches
        "num_sanity_val_steps": 0,
    },
    "steps": {"max_steps": 3, "max_epochs": None, "num_sanity_val_steps": -1},
    "every other epoch": {"max_epochs": 2, "min_epochs": 1, "min_steps": 2, "check_val_every_n_epoch": 2},
    "no validation": {"limit_val_batches": 0},
    "overfitting": {"overfit_batches": 2},
    "a quick run": {"fast_dev_run": 2},
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("options", OPTIONS)
def test_everything_that_a_trainer_shows_is_lightnings(options: str) -> None:
    theirs, ours = (everything(cls, **OPTIONS[options]) for cls in (L.Trainer, Trainer))
    assert_equal(theirs, ours)
    flags = {flag for _, reading in ours for flag in STAGES if reading[flag]}
    assert set(STAGES) - flags <= {"sanity_checking"}  # each was seen true


@BOTH
def test_module_and_loaders_of_a_run_are_the_users_own(cls: Any) -> None:
    module, loaders, run = Validated(), [loader() for _ in range(4)], trainer(cls)
    run.fit(module, *loaders[:2])
    assert run.lightning_module is run.model is module
    assert [run.train_dataloader, run.val_dataloaders] == loaders[:2]
    run.test(module, loaders[2], verbose=False)
    assert run.test_dataloaders is loaders[2]
    run.predict(module, loaders[3])
    assert run.predict_dataloaders.dataset is loaders[3].dataset  # Lightning's is a copy


@BOTH
def test_arguments_of_a_sampler_under_several_processes(cls: Any) -> None:
    assert trainer(cls, strategy="ddp", devices=2).distributed_sampler_kwargs == {"num_replicas": 2, "rank": 0}


@BOTH
def test_a_stage_is_set_by_its_flag(cls: Any) -> None:
    """Callbacks of Lightning do that; taking back a stage that is not the present one changes nothing."""
    run = trainer(cls)
    for name in STAGES:
        setattr(run, name, True)
        others = [flag for flag in STAGES if getattr(run, flag)]
        assert others == [name]
        assert run.evaluating == (name in ("validating", "testing", "sanity_checking"))
        run.training = name == "training"
        assert getattr(run, name)
        setattr(run, name, False)
        assert run.state.stage is None


# How many steps there will be


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({"max_epochs": 3}, 5),
        ({"max_epochs": 3, "accumulate_grad_batches": 2}, 5),
        ({"max_epochs": 3, "max_steps": 4}, 5),
        ({"max_epochs": 1, "limit_train_batches": 2}, 5),
        ({"max_epochs": -1, "max_steps": 3}, 5),
        ({"max_steps": 3}, None),
    ],
    ids=str,
)
def test_estimated_stepping_batches_are_lightnings(options: dict[str, Any], batches: int | None) -> None:
    class Module(Small):
        def configure_optimizers(self) -> Any:
            self.estimates = [self.trainer.estimated_stepping_batches]
            self.estimates.append(self.trainer.train_dataloader is None)  # where the estimate needs no loader
            return super().configure_optimizers()

        def on_train_end(self) -> None:
            self.estimates.append(self.trainer.estimated_stepping_batches)

    estimates = []
    for cls in (L.Trainer, Trainer):
        module, run = Module(), trainer(cls, **options)
        before = run.estimated_stepping_batches
        run.fit(module, loader(batches) if batches else DataLoader(Stream(4), batch_size=1))
        estimates.append([before, *module.estimates])
    assert estimates[0] == estimates[1]
    assert estimates[1][1] > 0


def test_endless_training_has_an_infinite_estimate() -> None:
    for cls in (L.Trainer, Trainer):
        assert trainer(cls, max_epochs=-1).estimated_stepping_batches == math.inf


# Callbacks, loggers, files


def test_callbacks_are_found_by_their_kind(tmp_path: Path) -> None:
    for cls in (L.Trainer, Trainer):
        bar = TQDMProgressBar()
        stopping = [EarlyStopping("a"), EarlyStopping("b")]
        saving = [ModelCheckpoint(tmp_path, monitor=name) for name in "ab"]
        own = [*saving, bar, *stopping]
        run = trainer(cls, callbacks=own, enable_checkpointing=True, enable_progress_bar=True)
        assert run.early_stopping_callbacks == stopping
        assert run.early_stopping_callback is stopping[0]
        assert run.checkpoint_callbacks == saving
        assert run.checkpoint_callback is saving[0]
        assert run.progress_bar_callback is bar


LOGGERS: dict[str, Any] = {
    "none": lambda folder: False,
    "TensorBoard": lambda folder: TensorBoardLogger(folder, name="tb", sub_dir="sub"),
    "two": lambda folder: [CSVLogger(folder, name="first"), CSVLogger(folder, name="second")],
    "no version": lambda folder: CSVLogger(folder, name="", version=""),
}


@pytest.mark.parametrize("kind", LOGGERS)
def test_folders_of_logs_are_lightnings(kind: str, tmp_path: Path) -> None:
    folders = []
    for cls in (L.Trainer, Trainer):
        run = trainer(cls, logger=LOGGERS[kind](tmp_path / "logs"), default_root_dir=tmp_path / "." / "root")
        folders.append((run.log_dir, run.default_root_dir, len(run.loggers), run.logger is None))
    assert folders[0] == folders[1]
    assert folders[1][1] == str(tmp_path / "root")


@BOTH
def test_loggers_may_be_set(cls: Any, tmp_path: Path) -> None:
    run, logger = trainer(cls), CSVLogger(tmp_path)
    run.logger = logger
    assert run.loggers == [logger]
    assert run.log_dir == logger.log_dir
    for name in ("logger", "loggers"):
        setattr(run, name, None)
        assert run.loggers == []
        assert run.logger is None


@pytest.mark.parametrize("folder", [".", "~/runs", "memory://bucket/runs/../x", None], ids=str)
def test_default_root_dir_is_lightnings(folder: str | None) -> None:
    theirs, ours = (trainer(cls, default_root_dir=folder).default_root_dir for cls in (L.Trainer, Trainer))
    assert theirs == ours


@BOTH
def test_a_checkpoint_that_is_set_is_loaded_in_the_runs_that_follow(cls: Any, tmp_path: Path) -> None:
    source = trainer(cls)
    source.fit(Validated(), loader(), loader())
    source.save_checkpoint(tmp_path / "x.ckpt")
    weight = source.lightning_module.layer.weight
    run = trainer(cls)
    assert run.ckpt_path is None
    run.ckpt_path = tmp_path / "x.ckpt"
    for _ in range(2):
        module = Validated()
        run.validate(module, loader(), verbose=False)
        assert torch.equal(module.layer.weight, weight)
        assert run.ckpt_path == tmp_path / "x.ckpt"
    run.ckpt_path = None
    module = Reads()
    run.validate(module, loader(), verbose=False)
    assert run.ckpt_path is None
    assert module.layer.weight.tolist() == [[0.5, 0.5]]


# Values


def test_an_error_within_a_property_is_not_one_about_its_name() -> None:
    class Own(Trainer):
        @property
        def share(self) -> float:
            return self.logger.no_such_value  # type: ignore[union-attr, return-value]

    own = Own(logger=False, barebones=True)
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'no_such_value'"):
        own.share  # noqa: B018
    assert not hasattr(own, "fitt")
