"""Measurements of a saver beside the memory of a step: its time without the loading of batches, losses, weights."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from equipoise.extensions.comparison.bench.probe import DeviceProbe

__all__ = ["STEPS", "SaverProbe", "digest_of"]

# Steps before the one whose memory is measured: the optimiser creates its state in the first.
_WARM_STEPS = 1
# Steps whose time is measured, after that.
_TIMED_STEPS = 3
STEPS = _WARM_STEPS + 1 + _TIMED_STEPS


class SaverProbe(DeviceProbe):
    """Measure the steps of one device.

    Attributes:
        seconds_of_steps: The time of each timed step, without the loading of its batches.
        losses: The mean loss of each step; None where `training_step` returned none.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        super().__init__(
            folder,
            [str(device)],
            root=0,
            home=0,
            settling_steps=_WARM_STEPS,
            timed_steps=_TIMED_STEPS,
            compared_step=STEPS,
        )
        self.seconds_of_steps: list[float] = []
        self.losses: list[float | None] = []
        self._loss: float | None = 0.0
        self._step_seconds = 0.0
        self._batch_start = 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to measure a batch."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self.wait()
        self._batch_start = perf_counter()

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the measurements of a batch, and of a step that ends with it."""
        self.wait()
        self._step_seconds += perf_counter() - self._batch_start
        loss = outputs
        if isinstance(outputs, Mapping):
            loss = outputs.get("loss")
        # In accumulation each loss is divided by the number of batches.
        if loss is None or self._loss is None:
            self._loss = None
        else:
            self._loss += float(loss)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        steps = trainer.global_step
        if steps == len(self.losses):
            return
        self.losses.append(self._loss)
        if steps > _WARM_STEPS + 1:
            self.seconds_of_steps.append(self._step_seconds)
        self._loss = 0.0
        self._step_seconds = 0.0


def digest_of(module: LightningModule) -> str:
    """Return a digest of all tensors in a module's state; equal weights have equal ones."""
    digest = hashlib.sha256()
    for name, value in module.state_dict().items():
        digest.update(name.encode())
        if isinstance(value, Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
