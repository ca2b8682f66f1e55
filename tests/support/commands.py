"""A project small enough to train in a tenth of a second, and a command that leaves no trace in this process."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

import equipoise.app
from equipoise.__main__ import main
from tests.support.projects import write

__all__ = ["FILES", "equipoise", "no_trace", "project", "quick"]

EXAMPLES = Path(__file__).parents[2] / "examples"
# Packages of projects, which differ from test to test.
PROJECTS = {"tiny", "broken", *(folder.name for folder in EXAMPLES.iterdir())}

FILES = {
    "conf/config.yaml": """
        defaults: [equipoise, _self_, module: line, data: points, experiment: null]
        trainer:
          max_epochs: 1
          accelerator: cpu
          log_every_n_steps: 1
          enable_progress_bar: false
          enable_model_summary: false
        # The search for leaks takes longer than the training.
        callbacks: {memory_logger: {leaks: false}}
        """,
    "conf/module/line.yaml": """
        _target_: tiny.module.Line
        lr: 0.1
        sizes: [1, 1]
        settings: {bias: true}
        """,
    "conf/data/points.yaml": """
        _target_: tiny.data.Points
        count: 8
        """,
    "conf/experiment/short.yaml": """
        # @package _global_
        defaults: [override /callbacks: [model_checkpoint]]
        trainer: {max_steps: 1}
        callbacks: {model_checkpoint: {save_last: true}}
        """,
    "tiny/__init__.py": "",
    "tiny/module.py": """
        import torch
        from lightning.pytorch import LightningModule

        class Line(LightningModule):
            def __init__(self, *, lr: float, sizes: list, settings: dict) -> None:
                super().__init__()
                self.save_hyperparameters()
                self.given = {"lr": lr, "sizes": sizes, "settings": settings}
                self.lr, self.layer = lr, torch.nn.Linear(*sizes, **settings)

            def training_step(self, batch, batch_idx):
                loss = (self.layer(batch) - 1).square().mean()
                self.log("train_loss", loss)
                return loss

            def validation_step(self, batch, batch_idx):
                self.log("val_loss", (self.layer(batch) - 1).square().mean())

            def test_step(self, batch, batch_idx):
                self.log("test_loss", (self.layer(batch) - 1).square().mean())

            def predict_step(self, batch, batch_idx):
                return self.layer(batch)

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=self.lr)
        """,
    "tiny/data.py": """
        import torch
        from lightning.pytorch import LightningDataModule
        from torch.utils.data import DataLoader

        class Points(LightningDataModule):
            def __init__(self, *, count: int) -> None:
                super().__init__()
                self.points = torch.linspace(0, 1, count).unsqueeze(1)

            def loader(self):
                return DataLoader(self.points, batch_size=4)

            train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader
        """,
}


@pytest.fixture(autouse=True, scope="module")
def quick(quick_collections: None) -> None:
    """Some fits look for leaks among all objects there are, which would take most of their time."""


@pytest.fixture(autouse=True)
def no_trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts back what a run sets in a process that is its own: search paths, imported projects, loggers, environment."""
    path, modules, environment = sys.path.copy(), set(sys.modules), os.environ.copy()
    handlers, level = logging.getLogger().handlers.copy(), logging.getLogger().level
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in PROJECTS:
            del sys.modules[name]
    os.environ.clear()
    os.environ.update(environment)
    for handler in set(logging.getLogger().handlers) - set(handlers):
        logging.getLogger().removeHandler(handler)
        handler.close()
    logging.getLogger().handlers[:] = handlers
    logging.getLogger().setLevel(level)
    assert not GlobalHydra.instance().is_initialized()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a project in it, and this process standing there."""
    write(tmp_path, FILES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def equipoise(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process: its exit code, what it wrote, and what it complained of."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(arguments)
        written = capfd.readouterr()
        return code, written.out, written.err

    return run
