"""Item 10: how long a checkpoint blocks training, and whether a resumed run is the same to the bit."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from benchmarks.gpu.campaign import ROOT, Row
from benchmarks.gpu.measuring import Setting
from benchmarks.gpu.networks import QUIET, Task, Training, adam, loss_of
from benchmarks.gpu.steps import quiet
from equipoise import Callback, Trainer

__all__ = ["be_killed", "checkpoints"]

GIB = 2**30
NAME = "midst.ckpt"


def large(setting: Setting) -> Task:
    """Return a network whose checkpoint with Adam's state has a GiB."""
    width = setting.pick(4096, 16)
    layers = setting.pick(5, 2)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)), nn.Linear(width, 10))

    def batch(number: int) -> Any:
        draw = torch.Generator().manual_seed(number)
        return torch.randn(16, width, generator=draw), torch.randint(10, (16,), generator=draw)

    return Task("large", make, batch)


class Save(Callback):
    """Saves after the second step, when the optimiser has its state, and measures how long that takes."""

    def __init__(self, path: Path, setting: Setting) -> None:
        self.path = path
        self.setting = setting
        self.seconds = 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save."""
        if batch_idx != 1:
            return
        self.setting.wait()
        begun = time.perf_counter()
        trainer.save_checkpoint(self.path)
        self.seconds = time.perf_counter() - begun


def checkpoints(setting: Setting) -> Iterator[Row]:
    """Save a large checkpoint, and resume runs in the midst of an epoch, one of them after it was killed."""
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "large.ckpt")
        task = large(setting)
        save = Save(path, setting)
        batches = DataLoader(task.batches(2, torch.device("cpu")), batch_size=None)  # type: ignore[arg-type]
        module = Training(task, adam)
        Trainer(devices=[setting.device], callbacks=[save], **QUIET).fit(module, batches)
        size = path.stat().st_size
        yield Row("size of a checkpoint", size / GIB, "GiB")
        yield Row.time("training waits for it", save.seconds, "s")
        yield Row.time("speed", size / save.seconds / 1e9, "GB/s")
    for name, options in {"plain": {}, "in a window": {"accumulate_grad_batches": 4}}.items():
        for precision in ("32-true", "16-mixed"):
            if precision == "16-mixed" and not setting.has_cuda:
                continue
            with tempfile.TemporaryDirectory() as folder:
                largest = resumed(Path(folder), setting, precision=precision, **options)
            yield Row.at_most(f"resumed {name}, {precision}: largest difference", largest, 0)
    with tempfile.TemporaryDirectory() as folder:
        yield from resumed_after_kill(Path(folder), setting)


class Resumable(Training):
    """Has what makes the midst of an epoch hard to find again: dropout, batch statistics, a metric."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, adam)
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = loss_of(self.network, batch)
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss


def small_task() -> Task:
    """Return a network with dropout and batch statistics."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 10))

    return Task("small", make, lambda number: (torch.zeros(1, 8), torch.zeros(1, dtype=torch.int64)))


class Saving(Callback):
    """Saves in the midst of the second epoch.

    Args:
        folder: Where.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save."""
        if trainer.current_epoch == 1 and batch_idx == 6:
            trainer.save_checkpoint(self.path)


class Kill(Callback):
    """Kills the process two steps later, between a forward and its backward."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Find the step."""
        self.is_due = trainer.current_epoch == 1 and batch_idx == 8

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Kill."""
        if self.is_due:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    setting: Setting, *callbacks: Callback, ckpt_path: Path | None = None, **options: Any
) -> tuple[Resumable, Trainer]:
    """Train for two epochs, from the beginning or from a checkpoint."""
    torch.manual_seed(1 if ckpt_path is None else 99)
    draw = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(40, 8, generator=draw), torch.randint(10, (40,), generator=draw))
    trainer = Trainer(
        devices=[setting.device],
        callbacks=list(callbacks),
        **{**QUIET, "max_epochs": 2, **options},
    )
    module = Resumable(small_task())
    trainer.fit(module, DataLoader(data, 4, shuffle=True), ckpt_path=ckpt_path)
    return module, trainer


def resumed(folder: Path, setting: Setting, **options: Any) -> float:
    """Return the largest difference between a resumed run and one that was not interrupted."""
    undisturbed = train(setting, Saving(folder), **options)
    continued = train(setting, ckpt_path=folder / NAME, **options)
    return largest_difference(undisturbed, continued)


def resumed_after_kill(folder: Path, setting: Setting) -> Iterator[Row]:
    """Kill a run in a process of its own, and resume it in this one."""
    flags = {"--small": setting.is_small, "--simulated": setting.is_simulated}
    chosen = [flag for flag, is_set in flags.items() if is_set]
    command = [sys.executable, "-m", "benchmarks.gpu", "--child", "10", "--killed-in", str(folder), *chosen]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    code = subprocess.run(command, cwd=ROOT, check=False, **silent).returncode
    yield Row.holds("a run was killed in the midst of a step", code == -signal.SIGKILL, f"exit code {code}")
    if code == -signal.SIGKILL:
        largest = largest_difference(train(setting), train(setting, ckpt_path=folder / NAME))
        yield Row.at_most("resumed after the kill: largest difference", largest, 0)


def be_killed(setting: Setting, folder: Path) -> None:
    """Train until the run kills this process."""
    quiet()
    train(setting, Saving(folder), Kill())


def largest_difference(one: tuple[Resumable, Trainer], other: tuple[Resumable, Trainer]) -> float:
    """Return the largest difference of weights, statistics and the metric of two runs."""
    values = []
    for module, trainer in (one, other):
        values.append({**module.state_dict(), "mean": trainer.callback_metrics["mean"].cpu()})
    return max(float((values[0][name].double() - values[1][name].double()).abs().max()) for name in values[0])
