"""Lightning's command line with our trainer."""

import inspect
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest

from equipoise import CLITrainer, Trainer
from tests.conftest import ignoring

pytestmark = ignoring()

SCRIPT = """
import lightning as L, torch
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset
import equipoise

class Module(L.LightningModule):
    def __init__(self, lr: float = 0.1):
        super().__init__()
        self.lr = lr
        self.net = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)

class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)

cli = LightningCLI(Module, Data, trainer_class=equipoise.CLITrainer)
assert type(cli.trainer) is equipoise.Trainer
print(cli.trainer.global_step, cli.trainer.world_size, cli.trainer.precision, cli.model.lr)
"""


def test_it_stands_for_our_trainer() -> None:
    assert issubclass(CLITrainer, L.Trainer)
    assert inspect.signature(CLITrainer.__init__) == inspect.signature(Trainer.__init__)
    run = CLITrainer(accelerator="cpu", max_epochs=3, logger=False)
    assert type(run) is Trainer
    assert run.max_epochs == 3


@pytest.mark.slow
def test_lightnings_command_line(tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse", reason="LightningCLI needs it")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    flags = ["--trainer.max_epochs=2", "--trainer.accelerator=cpu", "--trainer.precision=bf16", "--model.lr=0.5"]
    flags += ["--trainer.strategy=equipoise.DDPStrategy", "--trainer.strategy.engine=native", "--trainer.devices=2"]
    flags += ["--trainer.enable_model_summary=false", "--trainer.logger=lightning.pytorch.loggers.CSVLogger"]
    flags += [f"--trainer.logger.save_dir={tmp_path}"]
    command = [sys.executable, "-W", "ignore", str(script), "fit", *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "4 2 bf16-mixed 0.5"
    saved = (tmp_path / "lightning_logs" / "version_0" / "config.yaml").read_text()
    assert "class_path: equipoise.DDPStrategy" in saved
    assert "lr: 0.5" in saved
