"""MemoryLogger: memory by device and phase, the content of peaks, and growth from step to step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from equipoise.callbacks.callback import Callback
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
from equipoise.memory.leaks.watch import Leak, LeakWatch
from equipoise.memory.profile.ledger import Ledger
from equipoise.memory.records import Composition, MemoryPoint
from equipoise.notices import rank_zero_warn

__all__ = ["MemoryLogger"]

_PHASES = ("batch to device", "forward", "backward", "optimizer step", "evaluation")


@dataclass
class _Fit:
    """What belongs to one run.

    Attributes:
        readings: Reads the devices.
        batches: Training batches so far.
        begun: Whether the present batch was counted.
        epoch: The largest of the epoch, for other processes to be told.
        ledger: Of the step that is looked at in detail.
        detailed: The step that it is of.
        wanted: The steps that are still to be looked at so.
        leaks: Looks for growth.
        step: `trainer.global_step` before the batch.
        look_again: The step from which growth is looked for once more.
        busy: Whether every batch is looked at, be it due or not.
    """

    readings: Readings
    wanted: list[int]
    leaks: LeakWatch | None = None
    batches: int = 0
    begun: bool = False
    epoch: ByPhase = field(default_factory=dict)
    epoch_started: float = 0.0
    ledger: Ledger | None = None
    detailed: int = 0
    step: int = 0
    look_again: int = 100
    busy: bool = True

    def is_busy(self) -> bool:
        """Whether every batch is looked at."""
        return bool(self.wanted) or self.ledger is not None or (self.leaks is not None and self.leaks.watches_steps)


class MemoryLogger(Callback):
    """Reads the memory of every device in every phase of a step, and tells what grows from step to step.

    On CUDA a reading is the allocator's: allocated, reserved and peak bytes; on a CPU it is the resident set of the
    process. Nothing waits for a device. Readings go to the loggers in MiB, such as `memory/cuda:0/backward/peak_MiB`,
    with `memory/imbalance`, the fullest device's by the mean. In runs of several processes the first logs its own, and
    at an epoch's end the largest readings of all.

    With `detail="modules"` chosen steps are looked at tensor by tensor: parameters, gradients, the optimiser's state,
    activations, the batch and temporaries, by module, the same on a CPU and on CUDA. Such a step takes some times as
    long as others.

    A tensor that keeps its graph from step to step, as in `total += loss`, is noticed within the first steps, or when
    an epoch ends, and told with what holds it and the line that wrote it.

    Works in Lightning's Trainer, too, which does not tell when a batch goes to its device.

    Args:
        every_n_steps: Read in one of so many training batches. Default: 50.
        detail: "devices": readings of devices alone. "modules": chosen steps in detail. Default: "devices".
        detail_steps: The steps of the optimiser that are looked at in detail, counted from 0. Default: the second, when
            the optimiser has its state.
        leaks: Whether growth is looked for. Default: True.
        prog_bar: Whether the progress bar shows the fullest device. Default: False.

    Attributes:
        timeline: The readings, a `MemoryPoint` for each device and phase. The older half is thinned out when there
            are very many.
        compositions: With `detail="modules"`: what each device's peak was made of, over all steps in detail.
        phases: The same for each phase.
        leaks: What was found to grow.
        started: When the run began, of the clock `time.monotonic`; `MemoryPoint.seconds` count from here.

    Raises:
        ConfigurationError: If an argument cannot be right.

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
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ConfigurationError(f"every_n_steps is a whole number from 1, not {every_n_steps!r}.")
        if detail not in ("devices", "modules"):
            raise ConfigurationError(f"detail must be 'devices' or 'modules', not {detail!r}.")
        steps = (
            [detail_steps] if isinstance(detail_steps, int) else list((1,) if detail_steps is None else detail_steps)
        )
        if any(isinstance(step, bool) or not isinstance(step, int) or step < 0 for step in steps):
            raise ConfigurationError(f"detail_steps are whole numbers from 0, not {detail_steps!r}.")
        if detail_steps is not None and (detail == "devices" or not steps):
            raise ConfigurationError(
                f"detail_steps={detail_steps!r} goes with detail='modules', and names at least one step; with"
                f" detail={detail!r} no step is looked at in detail."
            )
        self.every_n_steps, self.detail, self.detail_steps = every_n_steps, detail, steps
        self.watch_leaks, self.prog_bar = leaks, prog_bar
        self.timeline: list[MemoryPoint] = []
        self.compositions: list[Composition] = []
        self.phases: list[Composition] = []
        self.leaks: list[Leak] = []
        self.started = 0.0
        self._fit: _Fit | None = None
        self._due = False

    def __getstate__(self) -> dict[str, Any]:
        """What was found; neither a run under way nor the methods that Lightning lends to callbacks."""
        return {**{k: v for k, v in vars(self).items() if k not in ("log", "log_dict")}, "_fit": None}

    # From the beginning to the end.

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """A run begins."""
        strategy = trainer.strategy
        given = getattr(strategy, "devices", None) or [strategy.root_device]
        devices = [
            device for device in dict.fromkeys(map(torch.device, given)) if device.type in ("cpu", "cuda", "mps")
        ]
        if stage == "fit" or not self.started:
            self.started = monotonic()
            self.timeline, self.compositions, self.phases, self.leaks = [], [], [], []
        wanted = sorted(self.detail_steps) if self.detail == "modules" else []
        self._fit = _Fit(readings=Readings(devices), wanted=wanted)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Training begins: what is alive now is no leak."""
        if (fit := self._fit) is None:
            return
        fit.step, fit.epoch_started = trainer.global_step, monotonic()
        if self.watch_leaks:
            fit.leaks = LeakWatch(lambda: _roots(trainer, pl_module, self), _keeps, began=self.started)
            self._look(fit, fit.leaks.start)

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """A run ends, or has failed."""
        fit, self._fit, self._due = self._fit, None, False
        if fit is not None:
            self._end_detail(trainer, fit)
            if fit.leaks is not None:
                fit.leaks.stop()

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """What the failed step held is kept."""
        self.teardown(trainer, pl_module, "fit")

    # A training batch.

    def on_before_batch_to_device(self, trainer: Any, pl_module: LightningModule, batch_idx: int) -> None:
        """A batch was read."""
        if (fit := self._fit) is not None:
            self._begin(trainer, fit)

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The batch lies on its devices."""
        if (fit := self._fit) is None:
            return
        if not fit.begun:  # Lightning's Trainer has not told that it was read
            self._begin(trainer, fit)
        elif self._due:
            fit.readings.read("batch to device")
        if fit.wanted or fit.ledger is not None:
            self._detail(trainer, pl_module, fit, batch)

    def on_before_backward(self, trainer: Any, pl_module: LightningModule, loss: Any) -> None:
        """A forward has ended."""
        if (fit := self._fit) is None:
            return
        if self._due:
            fit.readings.read("forward")
        if fit.ledger is not None:
            fit.ledger.begin("backward")

    def on_after_backward(self, trainer: Any, pl_module: LightningModule) -> None:
        """A backward has ended."""
        if (fit := self._fit) is None:
            return
        if self._due:
            fit.readings.read("backward")
        if fit.ledger is not None:
            fit.ledger.begin("optimizer step")

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The batch is done, and with it perhaps a step of the optimiser."""
        if (fit := self._fit) is None:
            return
        fit.begun = False
        if not fit.busy and not self._due:
            return
        step = trainer.global_step
        stepped, fit.step = step != fit.step, step
        if self._due:
            if stepped:
                fit.readings.read("optimizer step")
            self._record(trainer, pl_module, fit)
            self._due = False
        if stepped:
            if fit.ledger is not None:
                self._end_detail(trainer, fit)
            if fit.leaks is not None and fit.leaks.watches_steps:
                self._look(fit, partial(fit.leaks.after_step, step))
            elif fit.leaks is not None and step >= fit.look_again:  # for what has begun since
                fit.look_again = 2 * step
                if fit.leaks.is_worth_it():
                    self._look(fit, fit.leaks.start)
        fit.busy = fit.is_busy()

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """An epoch begins."""
        if (fit := self._fit) is not None:
            fit.epoch_started = monotonic()

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """An epoch ends: the readings of all processes are put together, and all tensors looked through."""
        if (fit := self._fit) is None:
            return
        self._end_detail(trainer, fit)
        if trainer.world_size > 1:
            self._gather(trainer, pl_module, fit)
        if fit.leaks is not None:
            seconds = monotonic() - fit.epoch_started
            self._look(fit, partial(fit.leaks.after_epoch, trainer.global_step, seconds))

    # Evaluations.

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """An evaluation begins."""
        if (fit := self._fit) is not None:
            fit.readings.reset()

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """An evaluation ends."""
        if (fit := self._fit) is not None and not trainer.sanity_checking:
            fit.readings.read("evaluation")
            self._record(trainer, pl_module, fit)

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    # Readings.

    def _begin(self, trainer: Any, fit: _Fit) -> None:
        """A batch begins: is it one of those that are looked at?"""
        fit.begun = True
        if self._due or fit.batches % self.every_n_steps == 0:  # still due: the batch before never ended
            self._due, fit.step = True, trainer.global_step
            fit.readings.reset()
        fit.batches += 1

    def _record(self, trainer: Any, pl_module: LightningModule, fit: _Fit) -> None:
        """Keeps and logs what was read."""
        readings = fit.readings.take()
        self._keep(readings, trainer.global_step)
        for key, reading in readings.items():
            fit.epoch[key] = larger(fit.epoch.get(key), reading)
        fullest = by_device(readings)
        self._log(trainer, metrics_of(readings), fullest)
        if self.prog_bar and fullest and trainer.training:
            value = max(fullest.values()) / 2**30
            pl_module.log("memory_GiB", value, prog_bar=True, logger=False, batch_size=1, rank_zero_only=True)

    def _keep(self, readings: ByPhase, step: int) -> None:
        self.timeline += points_of(readings, step, monotonic() - self.started)
        thin_out(self.timeline)

    def _gather(self, trainer: Any, pl_module: LightningModule, fit: _Fit) -> None:
        """Tells the first process the largest readings of the epoch of all."""
        device = str(fit.readings.devices[0])
        mine = [fit.epoch.get((device, phase), (-1, None, None)) for phase in _PHASES]
        fit.epoch = {}
        rows = [[-1 if value is None else value for value in reading] for reading in mine]
        gathered: Any = pl_module.all_gather(torch.tensor(rows, device=pl_module.device))
        if trainer.global_rank != 0:
            return
        kind, readings = device.partition(":")[0], {}
        for rank, rows in enumerate(gathered.tolist()):
            for phase, row in zip(_PHASES, rows, strict=True):
                if row[0] >= 0:
                    allocated, reserved, peak = (None if value < 0 else int(value) for value in row)
                    readings[f"rank {rank} {kind}", phase] = (allocated or 0, reserved, peak)
        others = {key: reading for key, reading in readings.items() if not key[0].startswith("rank 0 ")}
        self._keep(others, trainer.global_step)
        self._log(trainer, metrics_of(others), by_device(readings))

    def _log(self, trainer: Any, metrics: dict[str, float], fullest: dict[str, int]) -> None:
        if len(fullest) > 1:
            metrics["memory/imbalance"] = max(fullest.values()) * len(fullest) / sum(fullest.values())
        for logger in trainer.loggers if metrics else ():
            logger.log_metrics({"epoch": trainer.current_epoch, **metrics}, step=trainer.global_step)

    # In detail.

    def _detail(self, trainer: Any, pl_module: LightningModule, fit: _Fit, batch: Any) -> None:
        """Begins a step in detail if it is wanted; adds the batch to one."""
        if fit.ledger is None:
            if trainer.global_step < fit.wanted[0]:  # several optimisers may pass over it
                return
            fit.detailed = trainer.global_step
            fit.wanted = [step for step in fit.wanted if step > trainer.global_step]
            fit.ledger = Ledger(pl_module, trainer.optimizers)
            fit.ledger.start()
        else:
            fit.ledger.begin("forward")
        fit.ledger.add_batch(batch)

    def _end_detail(self, trainer: Any, fit: _Fit) -> None:
        """Ends a step in detail and keeps what it came to."""
        if (ledger := fit.ledger) is None:
            return
        fit.ledger = None
        ledger.stop()
        metrics: dict[str, float] = {}
        for device in ledger.devices():
            peak = ledger.peak(device, step=fit.detailed)
            self.compositions = with_largest(self.compositions, peak)
            for category, nbytes in peak.totals().items():
                metrics[f"memory/{device}/peak/{category.replace(' ', '_')}_MiB"] = to_mib(nbytes)
            for phase in ledger.phases():
                self.phases = with_largest(self.phases, ledger.peak(device, phase, step=fit.detailed), phase)
        self._log(trainer, metrics, {})

    def _look(self, fit: _Fit, look: Callable[[], list[Leak] | None]) -> None:
        """Looks for growth and tells it; whatever goes wrong there, training goes on."""
        try:
            leaks = look() or []
        except Exception as error:
            assert fit.leaks is not None
            fit.leaks.stop()
            fit.leaks = None
            rank_zero_warn(f"Memory that grows was looked for in vain: {type(error).__name__}: {error}")
            return
        for leak in leaks:
            self.leaks.append(leak)
            rank_zero_warn(str(leak))


def _roots(trainer: Any, pl_module: LightningModule, own: MemoryLogger) -> dict[str, object]:
    """What people know by name."""
    roots: dict[str, object] = {type(pl_module).__name__: pl_module}
    others = [callback for callback in trainer.callbacks if callback is not own]
    for thing in (*others, *trainer.loggers, getattr(trainer, "datamodule", None)):
        if thing is not None:
            roots.setdefault(type(thing).__name__, thing)
    return {**roots, "trainer": trainer}


def _keeps(thing: object) -> bool:
    """Whether something keeps tensors on purpose: metrics and optimisers their states, data sets what they read."""
    return issubclass(type(thing), Metric | Optimizer | Dataset | DataLoader)  # a proxy may raise when it is asked
