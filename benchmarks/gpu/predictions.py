"""Item 12: peaks of steps as `predict_memory` predicts them for a GPU, beside those of its allocator."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.gpu.campaign import Row
from benchmarks.gpu.measuring import Setting
from benchmarks.gpu.memory import MIB, collected, make_workspaces
from benchmarks.gpu.networks import QUIET, Task, Training, convolution, mlp, transformer
from benchmarks.gpu.steps import quiet
from equipoise import Callback, Trainer
from equipoise.extensions.planning import predict_memory

__all__ = ["predictions"]

PRECISIONS = ("32-true", "bf16-mixed")
MOST_ERROR = 0.05
"""The largest difference of both peaks, by the predicted one."""
WORKSPACES = 64 * MIB
"""Bytes of libraries that come on top, as in item 5."""
ROUNDING = 512
"""Bytes to which torch's allocator rounds a block."""
WATCHED_STEP = 2
"""The third step: optimisers have their state, and libraries their workspaces."""


class AllocatedPeak(Callback):
    """Measures the peak of one step.

    Args:
        device: The device.

    Attributes:
        nbytes: The peak in bytes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nbytes = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin."""
        if batch_idx == WATCHED_STEP:
            torch.cuda.reset_peak_memory_stats(self.device)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End."""
        if batch_idx == WATCHED_STEP:
            self.nbytes = torch.cuda.max_memory_allocated(self.device)


def predictions(setting: Setting) -> Iterator[Row]:
    """Compare predicted with measured peaks."""
    quiet()
    make_workspaces(setting)
    for task in (mlp(setting), convolution(setting), transformer(setting)):
        # Each prediction starts a process.
        for precision in setting.pick(PRECISIONS, PRECISIONS[:1]):
            predicted = predicted_peak(task, precision)
            measured = measured_peak(task, precision, setting)
            difference = abs(measured - predicted)
            is_kept = difference <= MOST_ERROR * predicted + WORKSPACES
            what = f"{task.name}, {precision}"
            yield Row(f"{what}: predicted peak", predicted / MIB, "MiB")
            # Of small sizes, the bound would be workspaces alone.
            judged = None if setting.is_small else is_kept
            yield Row(f"{what}: measured by predicted", measured / predicted, "", "within 5% and 64 MiB", judged)


def predicted_peak(task: Task, precision: str) -> int:
    """Return the predicted bytes, as a GPU rounds them."""
    prediction = predict_memory(Training(task), task.batch(0), precision=precision, device="cuda")
    return prediction.peak(rounding=ROUNDING).nbytes


def measured_peak(task: Task, precision: str, setting: Setting) -> int:
    """Return the bytes of the allocator."""
    before = collected(setting)
    batches = DataLoader(task.batches(WATCHED_STEP + 2, torch.device("cpu")), batch_size=None)  # type: ignore[arg-type]
    peak = AllocatedPeak(setting.device)
    options: dict[str, Any] = {**QUIET, "precision": precision}
    trainer = Trainer(strategy="single_device", devices=[setting.device], callbacks=[peak], **options)
    trainer.fit(Training(task), batches)
    return peak.nbytes - before
