"""Probe: the memory and the time of steps, their losses, and the weights that they lead to."""

import hashlib
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from equipoise.callbacks.callback import Callback
from equipoise.memory.devices import PeakWatch
from equipoise.memory.profile.ledger import Ledger

__all__ = ["TIMED_STEPS", "WARM_STEPS", "Probe", "digest_of"]

# Steps before the one whose memory is measured: the optimiser creates its state in the first.
WARM_STEPS = 1
# Steps whose time is measured, after that.
TIMED_STEPS = 3


class Probe(Callback):
    """Measure one step after the other: the peak of the memory of one, then the time of some.

    On CUDA the peak is that of the allocator. On other devices it is that of the ledger, to the byte.

    Attributes:
        peak: The peak in bytes; None before it is measured.
        seconds: The time of each timed step, without the loading of its batches.
        losses: The mean loss of each step; None where `training_step` returned none.
    """

    def __init__(self) -> None:
        self.peak: int | None = None
        self.seconds: list[float] = []
        self.losses: list[float | None] = []
        self._loss: float | None = 0.0
        self._step_seconds = 0.0
        self._batch_start = 0.0
        self._ledger: Ledger | None = None
        self._watch: PeakWatch | None = None
        self._device = torch.device("cpu")

    @property
    def device(self) -> torch.device:
        """The device on which the module computes; the CPU before training starts."""
        return self._device

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Note the device."""
        self._device = torch.device(trainer.strategy.root_device)

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to measure a batch."""
        if trainer.global_step == WARM_STEPS:
            self._begin_memory(trainer, pl_module, batch)
        self._wait()
        self._batch_start = perf_counter()

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the measurements of a batch, and of a step that ends with it."""
        self._wait()
        self._step_seconds += perf_counter() - self._batch_start
        # In accumulation each loss is divided by the number of batches.
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is None or self._loss is None:
            self._loss = None
        else:
            self._loss += float(loss)
        steps = trainer.global_step
        if steps == len(self.losses):
            return
        self.losses.append(self._loss)
        if steps == WARM_STEPS + 1:
            self._end_memory()
        elif steps > WARM_STEPS + 1:
            self.seconds.append(self._step_seconds)
        self._loss = 0.0
        self._step_seconds = 0.0

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Stop to record, if the run has ended before the last step."""
        self._end_memory()

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop to record after a failure, which skips the teardown."""
        self._end_memory()

    def _begin_memory(self, trainer: Any, module: LightningModule, batch: Any) -> None:
        """Begin to measure memory, with the first batch of the step."""
        if self._device.type == "cuda":
            if self._watch is None:
                self._watch = PeakWatch(self._device)
            return
        if self._ledger is None:
            self._ledger = Ledger(module, trainer.optimizers)
            self._ledger.start()
        self._ledger.add_batch(batch)

    def _end_memory(self) -> None:
        if self._watch is not None:
            self.peak = self._watch.peak()
        if self._ledger is not None:
            self._ledger.stop()
            self.peak = self._ledger.peak(str(self._device)).nbytes
        self._watch = None
        self._ledger = None

    def _wait(self) -> None:
        """Wait for the device, whose work the time would not contain otherwise."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def digest_of(module: LightningModule) -> str:
    """Return a digest of all tensors in a module's state; equal weights have equal ones."""
    digest = hashlib.sha256()
    for name, value in module.state_dict().items():
        digest.update(name.encode())
        if isinstance(value, Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
