"""Probe: the memory of each device in a step, the time of steps, and the weights after some steps."""

import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from equipoise.callbacks.callback import Callback
from equipoise.extensions.comparison.bench.idle import StepProfile
from equipoise.extensions.report.throughput import batches_of_step, samples_of
from equipoise.memory.devices import PeakWatch
from equipoise.memory.profile.ledger import Ledger
from equipoise.memory.profile.places import DevicePlaces, names_of_devices
from equipoise.parallel.batches.splitting import Splitter
from equipoise.parallel.device_work import observe_devices

__all__ = ["DeviceProbe", "parameters_of"]


class DeviceProbe(Callback):
    """Measure one step after the other: the peak of every device's memory in one, the time of others, the idle time.

    Then the training ends. On CUDA a peak is that of the allocator. On a CPU it is that of the ledger, which tells
    devices of one name apart. Each process writes its measurements into a file of its own.

    Args:
        folder: Folder for the files.
        devices: Names of the devices of all processes.
        root: Number of the device on which the rest of a step runs.
        home: Number of the device with the module's own weights, as far as they are not placed elsewhere.
        settling_steps: Number of steps before the measurements.
        timed_steps: Number of steps whose time is measured.
        compared_step: Number of steps after which the weights are kept.

    Attributes:
        weights: The parameters after `compared_step` steps, on the CPU; empty before.
        peaks: The peak of each device of this process in bytes, by name; empty before it is measured.
    """

    def __init__(
        self,
        folder: Path,
        devices: Sequence[str],
        *,
        root: int,
        home: int,
        settling_steps: int,
        timed_steps: int,
        compared_step: int,
    ) -> None:
        self.weights: dict[str, Tensor] = {}
        self._folder = folder
        self._names = names_of_devices(devices)
        self._root = root
        self._home = home
        self._settling_steps = settling_steps
        self._last_timed_step = settling_steps + 1 + timed_steps
        self._compared_step = compared_step
        # Measurements of this process.
        self.peaks: dict[str, int] = {}
        self._seconds: list[float] = []
        self._samples: list[int | None] = []
        self._idle: float | None = None
        # State of a run.
        self._devices: list[torch.device] = []
        self._own_names: list[str] = []
        self._ledger: Ledger | None = None
        self._places: DevicePlaces | None = None
        self._watches: dict[str, PeakWatch] = {}
        self._profile: StepProfile | None = None
        self._splitter: Splitter | None = None
        self._samples_of_step: int | None = 0
        self._steps = 0
        # The trainer's count, which grows with the step of each optimiser.
        self._global_step = 0
        self._step_end = 0.0

    # Hooks.

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Begin to record, so that copies of the module are seen when they are made."""
        # 1. The devices of this process.
        self._splitter = Splitter(pl_module, getattr(trainer.strategy, "dim", 0))
        self._devices = [torch.device(device) for device in trainer.strategy.devices]
        self._own_names = self._names
        if trainer.world_size > 1:
            self._own_names = [self._names[trainer.global_rank]]
            # It has one device.
            self._root = 0
            self._home = 0
        if self._devices[0].type == "cuda":
            return

        # 2. The ledger, which tells devices of one name apart.
        self._places = DevicePlaces(
            self._own_names,
            self._root,
            in_helper=lambda: ledger.in_other_thread(),
            on_placed=lambda tensor, name: ledger.move(tensor, name),
        )
        # Sharded weights are gathered into storages that grow and shrink.
        has_shards = trainer.world_size > 1
        ledger = Ledger(pl_module, trainer.optimizers, self._places, names_modules=False, watches_sizes=has_shards)
        self._ledger = ledger
        observe_devices(self._places)
        ledger.start()
        # 3. The weights may lie elsewhere than where the rest of a step runs.
        if self._home != self._root:
            for tensor in (*pl_module.parameters(), *pl_module.buffers()):
                self._places.note_placed(tensor, self._home)

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin the forward of a batch."""
        if self._ledger is not None and self._places is not None:
            self._places.begin_forward()
            self._ledger.begin("forward")
            self._ledger.add_batch(batch)

    def on_before_backward(self, trainer: Any, pl_module: LightningModule, loss: Tensor) -> None:
        """Begin the backward and the optimiser's step. Some savers refuse hooks between the two."""
        if self._ledger is not None and self._places is not None:
            self._ledger.begin("backward")
            self._places.begin_backward()

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the samples of a batch, and note the measurements of a step that ends with it."""
        # A process may have computed several batches, of which hooks receive the first.
        self._count_samples(batches_of_step(trainer.strategy, batch))
        if trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        self._steps += 1
        if self._steps == self._settling_steps:
            self._begin_memory()
        elif self._steps == self._settling_steps + 1:
            self._end_memory()
        elif self._settling_steps + 1 < self._steps <= self._last_timed_step:
            self._end_timed_step()
        elif self._profile is not None:
            self.wait()
            self._idle = self._profile.idle(trainer.strategy)
            self._profile = None
            trainer.should_stop = True
        self._samples_of_step = 0
        if self._steps == self._compared_step and trainer.world_size == 1:
            self.weights = parameters_of(pl_module)
        self.wait()
        if self._steps == self._last_timed_step and trainer.global_step < trainer.max_steps:
            # One more step, if there is one, shows where devices wait.
            self._profile = StepProfile(self._devices, self._root, is_alone=trainer.world_size == 1)
        self._step_end = perf_counter()

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Write the measurements of this process."""
        result = {"peaks": self.peaks, "seconds": self._seconds, "samples": self._samples, "idle": self._idle}
        path = self._folder / f"rank-{trainer.global_rank}.json"
        path.write_text(json.dumps(result), encoding="utf-8")

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Stop recording."""
        self._stop()

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop recording after a failure, which skips the teardown."""
        self._stop()

    # Measurements.

    def _count_samples(self, batches: Sequence[Any]) -> None:
        """Count the samples of batches."""
        assert self._splitter is not None
        # One of unknown size makes those of the step unknown.
        samples = samples_of(batches, self._splitter.size)
        if samples is None or self._samples_of_step is None:
            self._samples_of_step = None
        else:
            self._samples_of_step += samples

    def _begin_memory(self) -> None:
        """Begin to measure memory: what settling steps have needed does not count."""
        if self._ledger is not None:
            self._ledger.forget_peaks()
            return
        for name, device in zip(self._own_names, self._devices, strict=True):
            self._watches[name] = PeakWatch(device)

    def _end_memory(self) -> None:
        """Note the peaks, and stop recording."""
        for name, watch in self._watches.items():
            self.peaks[name] = watch.peak()
        ledger = self._ledger
        self._stop()
        if ledger is not None:
            for name in ledger.devices():
                self.peaks[name] = ledger.peak(name).nbytes

    def _end_timed_step(self) -> None:
        self.wait()
        self._seconds.append(perf_counter() - self._step_end)
        self._samples.append(self._samples_of_step)

    def _stop(self) -> None:
        if self._ledger is not None:
            observe_devices(None)
            self._ledger.stop()
        if self._profile is not None:
            self._profile.stop()
        self._profile = None
        self._ledger = None
        self._places = None
        self._watches = {}

    def wait(self) -> None:
        """Wait for the devices, whose work the time would not contain otherwise."""
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)


def parameters_of(module: LightningModule) -> dict[str, Tensor]:
    """Return copies of the parameters of a module, on the CPU."""
    return {name: parameter.detach().cpu().clone() for name, parameter in module.named_parameters()}
