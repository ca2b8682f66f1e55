"""Modules that a program loads: a fit on one device loads the core alone, and of that only a part."""

import subprocess
import sys

import pytest

PROGRAM = """
import os
import sys
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from equipoise import Trainer

class Small(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, default_root_dir=sys.argv[1])
trainer.fit(Small(), DataLoader(torch.rand(4, 2)))
files = {module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "equipoise"}
lines = sum(len(open(file, encoding="utf-8").readlines()) for file in files)
extensions = sorted(name for name in sys.modules if name.startswith("equipoise.extensions"))
print(f"{len(files)} files, {lines} lines, extensions: {extensions}")
"""
# With the default callbacks and the default logger.
MOST_FILES = 180
MOST_LINES = 25_300


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("run"))
    done = subprocess.run([sys.executable, "-c", PROGRAM, folder], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def test_a_fit_on_one_device_loads_a_part_of_the_core(loaded: str) -> None:
    files, lines = (int(part.split()[0]) for part in loaded.split(", ")[:2])
    assert files <= MOST_FILES, loaded
    assert lines <= MOST_LINES, loaded


def test_a_fit_on_one_device_loads_no_extension(loaded: str) -> None:
    assert loaded.endswith("extensions: []"), loaded
