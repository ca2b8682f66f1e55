"""Imports of a fresh interpreter, and packages that it does without: one program, since each takes many seconds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys

# Hydra is not installed.


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("hydra", "omegaconf"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())


def loaded():
    return {name.partition(".")[0] for name in sys.modules}


LIGHTNING = {"lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics"}

# Whatever asks for a device is noted.
import torch

calls = []


def note(module, name):
    function = getattr(module, name, None)

    def noted(*args, **kwargs):
        calls.append(name)
        return function(*args, **kwargs)

    if function is not None:
        setattr(module, name, noted)


for name in ("_lazy_init", "current_device", "device_count", "init", "is_available"):
    note(torch.cuda, name)
for name in ("_cuda_getDeviceCount", "_cuda_init"):
    note(torch._C, name)

# The package imports nothing of weight but torch.
import equipoise

dir(equipoise)
assert not loaded() & LIGHTNING
assert not loaded() & {"matplotlib", "rich", "tensorboard", "pandas", "sklearn"}

# An error is made without Lightning, and is Lightning's where Lightning is imported.
import pickle
from equipoise import ConfigurationError

error = ConfigurationError("the rule")
assert type(error) is ConfigurationError
sent = pickle.dumps(error)

# The packages need no import of their own, and may have one.
assert equipoise.callbacks.__all__ and equipoise.strategies.__all__ and equipoise.trainer.__all__
import equipoise.callbacks, equipoise.strategies, equipoise.trainer

assert not loaded() & LIGHTNING
equipoise.callbacks.Callback, equipoise.strategies.Strategy

# Names are imported as people type them.
from equipoise.callbacks import MemoryLogger
from equipoise.strategies import DDPStrategy
from equipoise import LightningDataModule, LightningModule, Trainer
import lightning.pytorch

assert LightningModule is lightning.pytorch.LightningModule
assert LightningDataModule is lightning.pytorch.LightningDataModule
assert equipoise.MemoryLogger is MemoryLogger
for name in equipoise.__all__:
    getattr(equipoise, name)

from lightning.fabric.utilities.exceptions import MisconfigurationException

assert isinstance(pickle.loads(sent), MisconfigurationException)

# Lightning's older package is not imported.
import equipoise.trainer.trainer

assert "pytorch_lightning" not in loaded()

# Imports ask no device and start no thread: a fork of a process that has done so cannot use CUDA, or hangs.
import threading
import warnings
from equipoise.parallel.workers.preloading import preloaded_modules

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in preloaded_modules():
        __import__(name)
assert not calls, calls
assert threading.enumerate() == [threading.main_thread()]
assert not torch.cuda.is_initialized()

# Training and checkpoints need no Hydra.
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset


class Module(LightningModule):
    def __init__(self, *, folder):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


warnings.filterwarnings("ignore", r".*isinstance\\(treespec, LeafSpec\\)")
warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
options = dict(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
loader = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
trainer = Trainer(max_epochs=1, **options)
trainer.fit(Module(folder=Path("here")), loader)
path = trainer.checkpoint_callback.best_model_path
assert Module.load_from_checkpoint(path, weights_only=False).hparams == {"folder": Path("here")}
again = Trainer(max_epochs=2, **options)
again.fit(Module(folder=Path("here")), loader, ckpt_path=path)
assert again.global_step == 4

# The command shows devices and facts without Hydra, and says what a fit needs.
from equipoise.__main__ import main

assert main(["devices"]) == 0
assert main(["doctor"]) == 0
assert not loaded() & {"hydra", "omegaconf"}
sys.exit(main(["fit"]))
"""


@pytest.mark.slow
def test_a_fresh_interpreter_imports_little_and_late_and_does_without_hydra(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-W", "error", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "cpu" in done.stdout
    assert "pip install hydra-core" in done.stderr
    assert "Traceback" not in done.stderr
