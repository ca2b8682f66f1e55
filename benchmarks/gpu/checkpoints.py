"""Item 10: how long a checkpoint blocks training, and whether a resumed run is the same to the bit."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from benchmarks.gpu.campaign import Row
from benchmarks.gpu.measuring import Setting
from benchmarks.gpu.networks import QUIET, Task, Training, adam, loss_of
from benchmarks.gpu.steps import quiet
from equipoise import Callback, Trainer

__all__ = ["checkpoints"]

GIB = 2**30


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
    """Save a large checkpoint, and resume runs in the midst of an epoch."""
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


def resumed(folder: Path, setting: Setting, **options: Any) -> float:
    """Return the largest difference between a resumed run and one that was not interrupted."""

    def run(ckpt_path: Path | None, *callbacks: Callback) -> tuple[Resumable, Trainer]:
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

    class Saving(Callback):
        """Saves in the midst of the second epoch."""

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            """Save."""
            if trainer.current_epoch == 1 and batch_idx == 6:
                trainer.save_checkpoint(folder / "midst.ckpt")

    undisturbed, first = run(None, Saving())
    continued, second = run(folder / "midst.ckpt")
    values = [undisturbed.state_dict(), continued.state_dict()]
    values[0]["mean"] = first.callback_metrics["mean"].cpu()
    values[1]["mean"] = second.callback_metrics["mean"].cpu()
    return max(float((values[0][name].double() - values[1][name].double()).abs().max()) for name in values[0])
