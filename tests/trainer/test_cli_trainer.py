"""Lightning's command line with our trainer."""

import inspect
import sys
from pathlib import Path

import lightning as L
import pytest

from equipoise import CLITrainer, Trainer
from tests.support.trainer_runs import Data, Small


class Module(Small):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr


def test_the_cli_trainer_stands_for_our_trainer() -> None:
    assert issubclass(CLITrainer, L.Trainer)
    assert inspect.signature(CLITrainer.__init__) == inspect.signature(Trainer.__init__)
    run = CLITrainer(accelerator="cpu", max_epochs=3, logger=False)
    assert type(run) is Trainer
    assert run.max_epochs == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of jsonargparse, about how Lightning calls it
def test_lightnings_command_line_trains_with_our_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse", reason="LightningCLI needs it")
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.chdir(tmp_path)
    flags = ["--trainer.max_epochs=2", "--trainer.accelerator=cpu", "--trainer.precision=bf16", "--model.lr=0.5"]
    flags += ["--trainer.strategy=equipoise.DDPStrategy", "--trainer.strategy.engine=native", "--trainer.devices=2"]
    flags += ["--trainer.enable_model_summary=false", "--trainer.logger=lightning.pytorch.loggers.CSVLogger"]
    flags += [f"--trainer.logger.save_dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["script.py", "fit", "--seed_everything=0", *flags])
    cli = LightningCLI(Module, Data, trainer_class=CLITrainer)
    assert type(cli.trainer) is Trainer
    assert (cli.trainer.global_step, cli.trainer.world_size) == (4, 2)
    assert (cli.trainer.precision, cli.model.lr) == ("bf16-mixed", 0.5)
    saved = (tmp_path / "lightning_logs" / "version_0" / "config.yaml").read_text()
    assert "class_path: equipoise.DDPStrategy" in saved
    assert "lr: 0.5" in saved
