"""Loggers from the argument `logger`."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger

from equipoise import Trainer
from equipoise.trainer.settings.loggers import _report_missing_tensorboard, select_loggers
from tests.support.trainer_runs import refuses


def test_the_default_logger_is_tensorboard_or_csv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def loggers(logger: Any, dummy: bool = False) -> list[Any]:
        return select_loggers(logger, str(tmp_path), dummy=dummy)

    own = CSVLogger(tmp_path)
    assert loggers(None) == loggers(False) == loggers([]) == []
    assert loggers(own) == loggers([own]) == loggers((own,)) == [own]
    (default,) = loggers(True)
    assert type(default) is TensorBoardLogger
    assert default.save_dir == str(tmp_path)
    assert [type(logger) for logger in loggers(own, dummy=True)] == [DummyLogger]

    def missing(**options: Any) -> None:
        raise ModuleNotFoundError("tensorboard")

    monkeypatch.setattr("equipoise.trainer.settings.loggers.TensorBoardLogger", missing)
    _report_missing_tensorboard.cache_clear()
    with caplog.at_level("INFO"):
        (default,), _ = loggers(True), loggers(True)
    assert type(default) is CSVLogger
    assert caplog.text.count("TensorBoard is not installed") == 1
    assert not list(tmp_path.iterdir())


def test_a_logger_without_a_place_for_checkpoints() -> None:
    class OnlyMethods:
        """Has the methods of a logger and nothing else."""

        def log_metrics(self, metrics: Any, step: Any = None) -> None: ...

        log_hyperparams = save = finalize = log_metrics

    logger: Any = OnlyMethods()
    refuses(lambda: Trainer(logger=logger), "OnlyMethods has no save_dir, name, version", "derive it from")


class Service(WandbLogger):
    """Keeps its files in a folder, as the logger of its class does."""

    name = version = ""
    save_dir = "memory://run"

    def __init__(self) -> None:
        pass


def test_a_service_cannot_write_to_an_address() -> None:
    """Its package would make a folder "memory:" here."""
    refuses(lambda: Trainer(logger=Service()), "Service writes to this machine alone, and not to 'memory://run'")
    assert Trainer(logger=CSVLogger("memory://run"), accelerator="cpu").loggers[0].save_dir == "memory://run"
    refuses(lambda: Trainer(logger=CSVLogger(Path("memory://run"))), "'memory:/run' was a URL")
