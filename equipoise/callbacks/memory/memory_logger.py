"""MemoryLogger: memory by device and phase, the content of peaks, and growth from step to step."""

from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule

from equipoise.callbacks.callback import Callback
from equipoise.callbacks.copied_state import copied_state
from equipoise.callbacks.memory.phase_readings import (
    ByPhase,
    Readings,
    by_device,
    larger,
    metrics_of,
    points_of,
    thin_out,
    to_mib,
    with_largest,
)
from equipoise.errors import ConfigurationError
from equipoise.interop.adapters import LEAKS, PROFILE, check_feature
from equipoise.interop.distributed.whole_weights import whole_weights
from equipoise.memory.profile.ledger import Ledger
from equipoise.memory.records import Composition, MemoryPoint
from equipoise.names.extensions import load_extension, names_of_extensions
from equipoise.notices import rank_zero_warn
from equipoise.parallel.communication.object_exchange import gather_objects
from equipoise.validation import check_whole, is_whole

__all__ = ["MemoryLogger"]

# The kind and the name of the extension that finds leaks.
_WATCHES = "watches"
_LEAKS = "leaks"
# Number of optimiser steps after which the leak watch starts once more, for growth that began later.
_FIRST_LEAK_CHECK = 100


class MemoryLogger(Callback):
    """Log the memory of every device in every phase of a step, and report memory that grows from step to step.

    On CUDA a reading is the allocator's: allocated, reserved and peak bytes; on a CPU it is the resident set of the
    process. Readings do not synchronise a device. Loggers receive them in MiB, such as
    `memory/cuda:0/backward/peak_MiB`, with `memory/imbalance`, the ratio of the fullest device to the mean. In runs of
    several processes the main process logs its own readings, and at the end of an epoch the largest of all processes.

    With `detail="modules"` chosen steps are examined tensor by tensor: parameters, gradients, the optimiser's state,
    activations, the batch and temporaries, by module, the same on a CPU and on CUDA. Such a step takes several times as
    long as others.

    A tensor that keeps its graph from step to step, as in `total += loss`, is a leak. It is reported within the first
    steps, or at the end of an epoch, with the objects that refer to it and the line of code that stored it.

    The callback works in Lightning's Trainer, too, but has no readings of "batch to device" there.

    Args:
        every_n_steps: Number of training batches between two readings. Default: 50.
        detail: "devices": readings of devices alone. "modules": chosen steps in detail. Default: "devices".
        detail_steps: Steps of the optimiser to examine in detail, counted from 0. Default: the second step, when the
            optimiser has its state.
        leaks: Watch for growth, if the extension that does so is installed. Default: True.
        prog_bar: Show the fullest device in the progress bar. Default: False.

    Attributes:
        timeline: The readings, a `MemoryPoint` for each device and phase. Its older half is thinned out when it
            becomes too long.
        compositions: With `detail="modules"`: composition of each device's peak, over all steps in detail.
        phases: The same for each phase.
        leaks: Leaks that were detected.
        started: Start of the run in seconds of `time.monotonic`; `MemoryPoint.seconds` count from here.

    Raises:
        ConfigurationError: If an argument is invalid.

    Example:
        >>> from equipoise import MemoryLogger, Trainer
        >>> memory = MemoryLogger(detail="modules")
        >>> Trainer(callbacks=[memory], max_epochs=1).fit(module, loader)  # doctest: +SKIP
        >>> print(memory.compositions[0])  # doctest: +SKIP
    """

    uses_outputs = False

    def __init__(
        self,
        *,
        every_n_steps: int = 50,
        detail: Literal["devices", "modules"] = "devices",
        detail_steps: Sequence[int] | None = None,
        leaks: bool = True,
        prog_bar: bool = False,
    ) -> None:
        check_whole("every_n_steps", every_n_steps, least=1)
        if detail not in ("devices", "modules"):
            raise ConfigurationError(f"detail must be 'devices' or 'modules', not {detail!r}.")
        if detail_steps is None:
            steps = [1]
        elif isinstance(detail_steps, int):
            steps = [detail_steps]
        else:
            steps = list(detail_steps)
        if not all(is_whole(step, least=0) for step in steps):
            raise ConfigurationError(f"detail_steps are whole numbers from 0, not {detail_steps!r}.")
        if detail_steps is not None and (detail == "devices" or not steps):
            raise ConfigurationError(
                f"detail_steps={detail_steps!r} goes with detail='modules', and names at least one step; with"
                f" detail={detail!r} no step is looked at in detail."
            )
        if detail == "modules":
            check_feature(PROFILE)
        if leaks:
            check_feature(LEAKS)
        self.every_n_steps = every_n_steps
        self.detail = detail
        self.detail_steps = steps
        self.watch_leaks = leaks
        self.prog_bar = prog_bar
        self.timeline: list[MemoryPoint] = []
        self.compositions: list[Composition] = []
        self.phases: list[Composition] = []
        self.leaks: list[Any] = []
        self.started = 0.0
        self._forget_run()

    def _forget_run(self) -> None:
        self._readings = Readings([])
        # Number of training batches so far, and whether the present one is counted.
        self._batches = 0
        self._is_batch_counted = False
        # Whether the phases of the present batch are read; whether any batch may be one of a step in detail, or of the
        # first steps, in which leaks are searched for.
        self._reads_phases = False
        self._examines_batches = True
        # `trainer.global_step` before the batch.
        self._step_before = 0
        # Largest readings of the epoch, for the main process, and the time at which the epoch has begun.
        self._largest_of_epoch: ByPhase = {}
        self._epoch_start = 0.0
        # Steps that are still to be examined in detail, in order; the ledger of the one that is, and its number.
        self._pending_details: list[int] = []
        self._ledger: Ledger | None = None
        self._ledger_step = 0
        # The watch of the extension that finds leaks, and the step from which it starts again.
        self._leak_watch: Any = None
        self._next_leak_check = _FIRST_LEAK_CHECK

    def __getstate__(self) -> dict[str, Any]:
        """Return the results, without the state of a run."""
        return copied_state(self, _ledger=None, _leak_watch=None)

    # Start and end of a run

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Prepare the readings of the strategy's devices."""
        # A validation after a fit adds to the results of the fit.
        if stage == "fit" or not self.started:
            self.started = monotonic()
            self.timeline = []
            self.compositions = []
            self.phases = []
            self.leaks = []
        self._forget_run()
        self._readings = Readings(_devices_of(trainer.strategy))
        if self.detail == "modules":
            self._pending_details = sorted(self.detail_steps)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Start to watch for leaks. Objects that exist now are none."""
        self._step_before = trainer.global_step
        self._epoch_start = monotonic()
        if self.watch_leaks and _LEAKS in names_of_extensions(_WATCHES):
            make_watch = load_extension(_WATCHES, _LEAKS)
            self._leak_watch = make_watch(trainer, pl_module, self, self.started)
            self._check_leaks(self._leak_watch.start)

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Stop recording at the end of a run, or after a failure."""
        # The ledger watches operations since later than the leak watch, so it ends first.
        self._end_detail(trainer)
        self._stop_leak_watch()
        self._forget_run()

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Record the memory of the failed step."""
        self.teardown(trainer, pl_module, "fit")

    # Training batches

    def on_before_batch_to_device(self, trainer: Any, pl_module: LightningModule, batch_idx: int) -> None:
        """Begin a batch that was read from the loader."""
        self._begin_batch(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Read the memory after the transfer of a batch."""
        # Lightning's Trainer does not call `on_before_batch_to_device`.
        if not self._is_batch_counted:
            self._begin_batch(trainer)
        elif self._reads_phases:
            self._readings.read("batch to device")
        if self._pending_details or self._ledger is not None:
            self._continue_detail(trainer, pl_module, batch)

    def on_before_backward(self, trainer: Any, pl_module: LightningModule, loss: Any) -> None:
        """Read the memory after a forward."""
        if self._reads_phases:
            self._readings.read("forward")
        if self._ledger is not None:
            self._ledger.begin("backward")

    def on_after_backward(self, trainer: Any, pl_module: LightningModule) -> None:
        """Read the memory after a backward."""
        if self._reads_phases:
            self._readings.read("backward")
        if self._ledger is not None:
            self._ledger.begin("optimizer step")

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the readings of the batch, and check for leaks after a step of the optimiser."""
        self._is_batch_counted = False
        if not self._examines_batches and not self._reads_phases:
            return
        step = trainer.global_step
        has_stepped = step != self._step_before
        self._step_before = step
        # 1. Record the readings.
        if self._reads_phases:
            if has_stepped:
                self._readings.read("optimizer step")
            self._record(trainer, pl_module)
            self._reads_phases = False
        # 2. End a step in detail. With gradient accumulation it lasts several batches.
        if has_stepped:
            self._end_detail(trainer)
            self._check_leaks_after_step(step)
        # 3. The leak watch examines the first steps only.
        watches_steps = self._leak_watch is not None and self._leak_watch.watches_steps
        self._examines_batches = bool(self._pending_details) or self._ledger is not None or watches_steps

    def _check_leaks_after_step(self, step: int) -> None:
        watch = self._leak_watch
        if watch is None:
            return
        # The first steps are checked one by one; later growth is searched for at doubling intervals.
        if watch.watches_steps:
            self._check_leaks(partial(watch.after_step, step))
        elif step >= self._next_leak_check:
            self._next_leak_check = 2 * step
            if watch.is_worth_it():
                self._check_leaks(watch.start)

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Note the time at which an epoch starts."""
        self._epoch_start = monotonic()

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Gather the readings of all processes, and search all tensors for leaks."""
        self._end_detail(trainer)
        if trainer.world_size > 1:
            self._log_largest_of_all(trainer)
        if self._leak_watch is not None:
            seconds = monotonic() - self._epoch_start
            self._check_leaks(partial(self._leak_watch.after_epoch, trainer.global_step, seconds))

    # Evaluations

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Reset the peaks before an evaluation."""
        self._readings.reset()

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Record the memory of an evaluation."""
        if not trainer.sanity_checking:
            self._readings.read("evaluation")
            self._record(trainer, pl_module)

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    # Readings

    def _begin_batch(self, trainer: Any) -> None:
        """Begin a batch, and decide whether its phases are read."""
        # After a batch that failed, the reading is still due.
        if self._reads_phases or self._batches % self.every_n_steps == 0:
            self._reads_phases = True
            self._step_before = trainer.global_step
            self._readings.reset()
        self._is_batch_counted = True
        self._batches += 1

    def _record(self, trainer: Any, pl_module: LightningModule) -> None:
        """Store and log the readings of a batch or an evaluation."""
        readings = self._readings.take()
        self._store(readings, trainer.global_step)
        for key, reading in readings.items():
            self._largest_of_epoch[key] = larger(self._largest_of_epoch.get(key), reading)
        fullest = by_device(readings)
        self._log(trainer, metrics_of(readings), fullest)
        # The module may log in hooks of training only.
        if self.prog_bar and fullest and trainer.training:
            value = max(fullest.values()) / 2**30
            pl_module.log("memory_GiB", value, prog_bar=True, logger=False, batch_size=1, rank_zero_only=True)

    def _store(self, readings: ByPhase, step: int) -> None:
        self.timeline += points_of(readings, step, monotonic() - self.started)
        thin_out(self.timeline)

    def _log_largest_of_all(self, trainer: Any) -> None:
        """Log in the main process the largest readings of the epoch of all processes."""
        # Lightning's strategies have no such method.
        gather = getattr(trainer.strategy, "gather_objects", gather_objects)
        gathered = gather(self._largest_of_epoch)
        self._largest_of_epoch = {}
        if trainer.global_rank != 0:
            return
        readings: ByPhase = {}
        of_other_ranks: ByPhase = {}
        for rank, of_rank in enumerate(gathered):
            for (device, phase), reading in of_rank.items():
                key = (f"rank {rank} {torch.device(device).type}", phase)
                readings[key] = reading
                # The main process has logged its own readings already.
                if rank:
                    of_other_ranks[key] = reading
        self._store(of_other_ranks, trainer.global_step)
        self._log(trainer, metrics_of(of_other_ranks), by_device(readings))

    def _log(self, trainer: Any, metrics: dict[str, float], fullest: dict[str, int]) -> None:
        if len(fullest) > 1:
            metrics["memory/imbalance"] = max(fullest.values()) * len(fullest) / sum(fullest.values())
        if not metrics:
            return
        for logger in trainer.loggers:
            logger.log_metrics({"epoch": trainer.current_epoch, **metrics}, step=trainer.global_step)

    # Steps in detail

    def _continue_detail(self, trainer: Any, pl_module: LightningModule, batch: Any) -> None:
        """Begin a step in detail if it is due; add the batch to the ledger."""
        if self._ledger is not None:
            self._ledger.begin("forward")
        elif trainer.global_step < self._pending_details[0]:
            return
        else:
            self._ledger = self._start_ledger(trainer, pl_module)
        self._ledger.add_batch(batch)

    def _start_ledger(self, trainer: Any, module: LightningModule) -> Ledger:
        step = trainer.global_step
        self._ledger_step = step
        # With several optimisers, the step may already be beyond the chosen one.
        self._pending_details = [later for later in self._pending_details if later > step]
        weights = whole_weights(module)
        ledger = Ledger(module, trainer.optimizers, watches_sizes=weights is not None)
        ledger.start()
        ledger.add_gathered(weights or ())
        return ledger

    def _end_detail(self, trainer: Any) -> None:
        """End a step in detail, and store and log its peaks."""
        ledger = self._ledger
        if ledger is None:
            return
        self._ledger = None
        ledger.stop()
        # Of several steps in detail, the largest peak of each device and phase stays.
        metrics: dict[str, float] = {}
        for device in ledger.devices():
            peak = ledger.peak(device, step=self._ledger_step)
            self.compositions = with_largest(self.compositions, peak)
            for category, nbytes in peak.totals().items():
                metrics[f"memory/{device}/peak/{category.replace(' ', '_')}_MiB"] = to_mib(nbytes)
            for phase in ledger.phases():
                peak = ledger.peak(device, phase, step=self._ledger_step)
                self.phases = with_largest(self.phases, peak, phase)
        self._log(trainer, metrics, {})

    def _stop_leak_watch(self) -> None:
        if self._leak_watch is not None:
            self._leak_watch.stop()
            self._leak_watch = None

    def _check_leaks(self, check: Callable[[], list[Any] | None]) -> None:
        """Run a check for leaks and report them. An error of the check does not stop training."""
        try:
            leaks = check() or []
        except Exception as error:
            self._stop_leak_watch()
            rank_zero_warn(f"The search for growing memory failed: {type(error).__name__}: {error}")
            return
        for leak in leaks:
            self.leaks.append(leak)
            rank_zero_warn(str(leak))


def _devices_of(strategy: Any) -> list[torch.device]:
    """Return the devices of a strategy whose memory can be read, without repetitions."""
    devices: list[torch.device] = []
    # Strategies of Lightning have only a root device.
    for name in getattr(strategy, "devices", None) or [strategy.root_device]:
        device = torch.device(name)
        if device.type in ("cpu", "cuda", "mps") and device not in devices:
            devices.append(device)
    return devices
