"""From names to objects: strategies, loggers, default callbacks, torch's flags."""

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    OnExceptionCheckpoint,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from equipoise import (
    BalancedDataParallelStrategy,
    DataParallelStrategy,
    DDPStrategy,
    ProgressBar,
    SingleDeviceStrategy,
    Strategy,
    Trainer,
)
from equipoise.precision import make_precision
from equipoise.tables.model_summary import WholeModelSummary
from equipoise.trainer.settings import defaults as select
from equipoise.trainer.settings.callbacks import select_callbacks
from tests.conftest import ignoring
from tests.support.trainer_runs import Small, loader, refuses, trainer

pytestmark = ignoring()
CPU = torch.device("cpu")

# Strategies


@pytest.mark.parametrize("name", ["auto", "single_device"])
def test_a_strategy_by_name(name: str) -> None:
    strategy = select.select_strategy(name, [CPU], 1)
    assert type(strategy) is SingleDeviceStrategy
    assert strategy.devices == (CPU,)


def test_several_devices_of_one_model_and_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(DDPStrategy, "__init__", lambda self, shares=None: measured.append(shares))
    monkeypatch.setattr(DDPStrategy, "connect", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: ["slow", "fast", "fast"][device.index])
    cards = [torch.device("cuda", index) for index in range(3)]
    for devices in ([CPU, CPU], cards[1:], cards):
        assert type(select.select_strategy("auto", devices, 1)) is DDPStrategy
    assert measured == [None, None, "auto"]


def test_several_devices_where_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "can_start_workers", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: ["slow", "fast", "fast"][device.index])
    cards = [torch.device("cuda", index) for index in range(3)]
    kinds = {1: SingleDeviceStrategy, 2: DataParallelStrategy, 3: BalancedDataParallelStrategy}
    for count, kind in kinds.items():
        assert type(select.select_strategy("auto", cards[-count:], 1)) is kind


def test_a_strategy_of_the_users_own() -> None:
    class Own(Strategy):
        name = "own"

    own = Own()
    assert select.select_strategy(own, [CPU, CPU], 1) is own
    assert own.devices == (CPU, CPU)
    run = trainer(strategy=Own(), devices=2)
    assert isinstance(run.strategy, Own)
    run.fit(Small(), loader())
    assert run.global_step == 3


# Loggers


def test_loggers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def loggers(logger: Any, dummy: bool = False) -> list[Any]:
        return select.select_loggers(logger, str(tmp_path), dummy=dummy)

    own = CSVLogger(tmp_path)
    assert loggers(None) == loggers(False) == loggers([]) == []
    assert loggers(own) == loggers([own]) == loggers((own,)) == [own]
    (default,) = loggers(True)
    assert type(default) is TensorBoardLogger
    assert default.save_dir == str(tmp_path)
    assert [type(logger) for logger in loggers(own, dummy=True)] == [DummyLogger]

    def missing(**options: Any) -> None:
        raise ModuleNotFoundError("tensorboard")

    monkeypatch.setattr(select, "TensorBoardLogger", missing)
    select._report_missing_tensorboard.cache_clear()
    with caplog.at_level("INFO"):
        (default,), _ = loggers(True), loggers(True)
    assert type(default) is CSVLogger
    assert caplog.text.count("TensorBoard is not installed") == 1
    assert not list(tmp_path.iterdir())


# Callbacks


def kinds(callbacks: list[Any]) -> list[type]:
    return [type(callback) for callback in callbacks]


def chosen(callbacks: Any = None, **options: Any) -> list[Any]:
    defaults = {
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_time": None,
    }
    return select_callbacks(callbacks, **{**defaults, **options})


def test_default_callbacks() -> None:
    everything = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), True)
    assert kinds(chosen(**everything)) == [ProgressBar, WholeModelSummary, ModelCheckpoint]
    assert chosen() == []
    own = [ModelCheckpoint("x"), TQDMProgressBar(), ModelSummary(max_depth=2)]
    assert chosen(own, **everything) == [own[1], own[2], own[0]]


def test_one_callback_or_several() -> None:
    callback = L.Callback()
    for callbacks in (callback, [callback], (callback,), iter([callback])):
        assert chosen(callbacks) == [callback]


def test_checkpoints_come_last() -> None:
    """They save what the others left."""
    callbacks = [ModelCheckpoint("a"), EarlyStopping("x"), OnExceptionCheckpoint("b"), LearningRateMonitor()]
    assert chosen(callbacks, enable_checkpointing=True) == [callbacks[1], callbacks[3], callbacks[0], callbacks[2]]


def test_max_time_brings_a_timer(caplog: pytest.LogCaptureFixture) -> None:
    (timer,) = chosen(max_time=timedelta(minutes=2))
    assert isinstance(timer, Timer)
    assert timer.time_remaining() == 120
    own = Timer("00:00:00:05")
    with caplog.at_level("INFO"):
        assert chosen([own], max_time="00:00:01:00") == [own]
    assert "max_time is left aside" in caplog.text


class First(L.Callback): ...


class Second(First): ...


MERGES: dict[str, tuple[list[Any], list[Any]]] = {
    "none": ([First(), EarlyStopping("x")], []),
    "another": ([First()], [EarlyStopping("x")]),
    "the same class": ([First(), EarlyStopping("x")], [EarlyStopping("y")]),
    "a subclass": ([First(), EarlyStopping("x")], [Second()]),
    "a base class": ([Second()], [First()]),
    "a checkpoint": ([ModelCheckpoint(), First()], [ModelCheckpoint("z"), Second()]),
    "twice": ([First(), First()], [First()]),
}


@pytest.mark.parametrize("name", MERGES)
def test_callbacks_of_the_module_replace_ones_of_their_class(name: str) -> None:
    """As under Lightning, in the same order."""
    callbacks, of_module = MERGES[name]
    module = type("Module", (Small,), {"configure_callbacks": lambda self: of_module})()
    merged = []
    for cls in (L.Trainer, Trainer):
        run = trainer(cls, callbacks=list(callbacks), enable_checkpointing="checkpoint" in name, max_steps=0)
        run.fit(module, loader())
        merged.append(run.callbacks)
    assert merged[0] == merged[1]


# Folders and flags


def test_root_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert select.root_directory(None) == str(tmp_path)
    assert select.root_directory(Path("a") / "b") == os.path.join("a", "b")
    assert trainer(default_root_dir="memory://x").default_root_dir == "memory://x"
    monkeypatch.setenv("HOME", "/home/somebody")
    assert trainer(default_root_dir="~/runs").default_root_dir == "/home/somebody/runs"


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's flags as they are by default, and as they were afterwards."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)  # whatever was there before comes back with monkeypatch


@pytest.mark.parametrize(
    ("deterministic", "benchmark", "expected"),
    [
        (None, None, (False, False, True)),
        (True, None, (True, False, False)),
        ("warn", None, (True, True, False)),
        (False, None, (False, False, True)),
        (True, True, (True, False, True)),
        (None, False, (False, False, False)),
    ],
)
@pytest.mark.usefixtures("flags")
def test_flags(deterministic: Any, benchmark: Any, expected: tuple[bool, bool, bool]) -> None:
    select.set_torch_flags(deterministic, benchmark)
    enabled = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    assert (*enabled, torch.backends.cudnn.benchmark) == expected
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if deterministic else None)


@pytest.mark.usefixtures("flags")
def test_a_workspace_that_was_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    trainer(deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


# Plugins and modules


def test_checkpoint_plugins() -> None:
    plugin = AsyncCheckpointIO()
    for plugins in (plugin, [plugin], (plugin,)):
        assert select.select_plugins(plugins).checkpoint_io is plugin
    assert plugin.checkpoint_io is not None
    for nothing in (None, []):
        assert select.select_plugins(nothing).checkpoint_io is None


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true"])
@pytest.mark.parametrize("empty", [False, True])
def test_modules_are_made_where_they_will_be(precision: str, empty: bool) -> None:
    state = torch.get_rng_state()
    with trainer(precision=precision).init_module(empty_init=empty):
        layer = torch.nn.Linear(2, 2)
    assert layer.weight.dtype == {"32-true": torch.float32, "64-true": torch.float64}.get(precision, torch.bfloat16)
    assert torch.equal(state, torch.get_rng_state()) == empty
    with select.module_init_context(torch.device("meta"), make_precision(None, "cpu"), empty=empty):
        assert torch.nn.Linear(2, 2).weight.device.type == "meta"
    assert torch.get_default_dtype() is torch.float32


def test_a_logger_without_a_place_for_checkpoints() -> None:
    class OnlyMethods:
        """Has the methods of a logger and nothing else."""

        def log_metrics(self, metrics: Any, step: Any = None) -> None: ...

        log_hyperparams = save = finalize = log_metrics

    logger: Any = OnlyMethods()
    refuses(lambda: Trainer(logger=logger), "OnlyMethods has no save_dir, name, version", "derive it from")
