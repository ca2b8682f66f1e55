"""StepTimes: the callback that tells where the time of a run goes, and what limits it."""

import math
import os
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import DataLoader, IterableDataset

from equipoise.callbacks.callback import Callback
from equipoise.callbacks.copied_state import copied_state
from equipoise.extensions.timing.clock import FIRST_STEPS, Clock
from equipoise.extensions.timing.device_times import DeviceTimes
from equipoise.extensions.timing.host_work import HostWork
from equipoise.extensions.timing.limits import LEAST_SHARE, Facts, find_limit
from equipoise.extensions.timing.parts import DATA, Cell, cell_of
from equipoise.extensions.timing.run_times import RunTimes, without_inner_parts
from equipoise.interop.lightning.classes import is_a
from equipoise.interop.torch.modules import is_compiled
from equipoise.to_device import copy_batch
from equipoise.trainer.hooks.hooks import state_key_of
from equipoise.validation import check_whole

__all__ = ["StepTimes"]

_MOST_EPOCHS = 500


class StepTimes(Callback):
    """Tell where the time of a fit goes, and name in one sentence what limits it.

    The parts are: waiting for data, copying batches, forward, backward, exchange between processes, optimiser, each
    callback, hooks of the module, loggers, validation, checkpoints and the rest. Parts do not contain one another. The
    first three steps, which compile and allocate, are apart. `RunSummary` shows the shares and the sentence, and
    `RunReport` has a table of them. A run without a limit, or of less than a second or 20 steps, has no sentence.

    A step costs 0.95 µs on a CPU, and 0.2 µs for each hook of a callback that it calls. No device is waited for: on
    CUDA, events in one step of 47 are read once the device has passed them. In several processes each has its own
    clock, and all exchange their times once, at the end of the training.

    Lightning's Trainer does not call `wrap_call`, so there the callback tells nothing.

    Args:
        log: Log the share of each part in the time of an epoch as `time/PART`, from 0 to 1, at the end of each epoch.
            Default: False.
        first_steps: Number of first steps. Default: 3.

    Attributes:
        times: The times of this process; None before the end of the first steps.
        limit: The sentence; None if nothing limits the run.
        facts: The facts on which its remedy depends; None before the end of a fit.
        history: For each epoch the step at its end, and the share of each part; at most 500, thinned.

    Example:
        >>> from equipoise import StepTimes, Trainer
        >>> times = StepTimes()
        >>> Trainer(callbacks=[times], max_epochs=1).fit(module, loader)  # doctest: +SKIP
        >>> print(times.limit)  # doctest: +SKIP
        42% of the time is spent waiting for data: the loader has num_workers=0: try num_workers=8
    """

    def __init__(self, *, log: bool = False, first_steps: int = FIRST_STEPS) -> None:
        self.log_shares = log
        check_whole("first_steps", first_steps, least=1)
        self.first_steps = first_steps
        self.times: RunTimes | None = None
        self.limit: str | None = None
        self.facts: Facts | None = None
        self.history: list[tuple[int, dict[str, float]]] = []
        self._clock: Clock | None = None
        self._host_work = HostWork(0)
        self._is_by_hand = False
        self._validations = 0
        # Seconds of the run and of its cells at the end of the last epoch.
        self._earlier: tuple[float, dict[Cell, float]] = (0.0, {})
        # The same at the last look of a progress bar.
        self._shown: tuple[float, dict[Cell, float]] = (0.0, {})

    def __getstate__(self) -> dict[str, Any]:
        """Return the results, without the clock of a run."""
        return copied_state(self, _clock=None)

    # The clock.

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Start the clock."""
        device_times = None
        if trainer.strategy.root_device.type == "cuda":
            device_times = DeviceTimes()
        self._clock = Clock(device_times, self.first_steps)
        self._host_work = HostWork(self.first_steps if _is_watched(trainer, pl_module) else 0)
        self._is_by_hand = not pl_module.automatic_optimization
        self._validations = 0
        self._earlier = (0.0, {})
        self._shown = (0.0, {})
        self.history = []
        self.times = None
        self.limit = None

    def wrap_call(self, trainer: Any, action: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Time a call of the loop."""
        clock = self._clock
        if action.startswith("[Strategy]") and action.endswith(".training_step"):
            return self._host_work.watching(function)
        # A copy that has nothing to do is not worth the clock.
        if clock is None or (function is copy_batch and clock.device_times is None):
            return function
        checkpoints = [state_key_of(callback) for callback in trainer.callbacks if is_a(callback, Checkpoint)]
        cell = cell_of(action, checkpoints, in_validation=not trainer.training, by_hand=self._is_by_hand)
        if cell is None:
            return function
        if cell.part == DATA:
            return clock.timed_and_counted(function, cell)
        return clock.timed(function, cell)

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Count a validation."""
        clock = self._clock
        if clock is None:
            return
        self._validations += bool(clock.measured_steps)
        if clock.device_times is not None:
            clock.device_times.leave_out()

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Note the shares of the epoch, and log them, if that is wanted."""
        clock = self._clock
        if clock is None or not clock.measured_steps:
            return
        shares = self._read(clock, self._earlier).shares()
        self._earlier = (clock.elapsed(), clock.seconds())
        self.history.append((trainer.global_step, shares))
        # A long run keeps every second, fourth, eighth ... epoch of its past.
        if len(self.history) > _MOST_EPOCHS:
            del self.history[::2]
        if not self.log_shares:
            return
        for name, share in shares.items():
            pl_module.log(f"time/{name.replace(' ', '_')}", share)

    def progress_values(self) -> dict[str, str]:
        """Return a word where data are late: the share of the time since the last redraw that was spent waiting."""
        clock = self._clock
        if clock is None or not clock.measured_steps:
            return {}
        share = self._read(clock, self._shown).shares().get(DATA, 0.0)
        self._shown = (clock.elapsed(), clock.seconds())
        if share < LEAST_SHARE:
            return {}
        return {"data": f"late {share:.0%}"}

    # The results.

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Conclude, unless that was done."""
        self.conclude(trainer)

    def conclude(self, trainer: Any) -> None:
        """Exchange the times of all processes, and conclude. It may be called before the end, by all processes.

        Args:
            trainer: The trainer of the fit.
        """
        times = self._read_all()
        # Lightning's strategies have none.
        processes = getattr(trainer.strategy, "processes", None)
        if processes is not None and trainer.world_size > 1:
            ranks = processes.gather_objects(times)
            if times is not None and None not in ranks:
                times.ranks = [other.own_seconds() for other in ranks]
        self._conclude(trainer, times)

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Conclude with the times up to now."""
        self._conclude(trainer, self._read_all())

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Forget the clock."""
        self._clock = None

    def _read_all(self) -> RunTimes | None:
        """Return the times up to now; None before the end of the first steps."""
        clock = self._clock
        if clock is None or not clock.measured_steps:
            return None
        return self._read(clock, (0.0, {}))

    def _read(self, clock: Clock, since: tuple[float, dict[Cell, float]]) -> RunTimes:
        """Return the times since earlier ones."""
        device = None
        if clock.device_times is not None:
            clock.device_times.read()
            device = clock.device_times.seconds
        earlier_seconds, earlier = since
        seconds = clock.elapsed() - earlier_seconds
        cells = {cell: total - earlier.get(cell, 0.0) for cell, total in clock.seconds().items()}
        parts = without_inner_parts(cells, seconds, device)
        return RunTimes(seconds, clock.measured_steps, clock.first_seconds, parts)

    def _conclude(self, trainer: Any, times: RunTimes | None) -> None:
        self._clock = None
        if times is None:
            return
        self.times = times
        self.facts = _facts(trainer, self._validations, self._host_work)
        limit = find_limit(times, self.facts)
        if limit is not None:
            self.limit = str(limit)
        trainer.summary_rows.update(times.rows())
        if self.limit is not None:
            trainer.summary_rows["limit"] = self.limit
            if not _has_summary(trainer):
                rank_zero_info(f"What limits this run: {self.limit}.")


def _has_summary(trainer: Any) -> bool:
    from equipoise.extensions.report.run_summary import RunSummary

    return any(isinstance(callback, RunSummary) for callback in trainer.callbacks)


def _is_watched(trainer: Any, module: LightningModule) -> bool:
    """Return whether `training_step` calls all its operations one by one, in this thread, and waits for no process."""
    is_alone = trainer.world_size == 1 and getattr(trainer.strategy, "keeps_batches_whole", False)
    if not is_alone or trainer.compiles_steps or trainer.captures_steps:
        return False
    return not any(map(is_compiled, module.modules()))


def _facts(trainer: Any, validations: int, host_work: HostWork) -> Facts:
    """Return the facts on which the sentence depends."""
    loader = trainer.train_dataloader
    # Workers of a stream each read all of it, unless it shares itself out.
    if not isinstance(loader, DataLoader) or (isinstance(loader.dataset, IterableDataset) and not loader.num_workers):
        loader = None
    return Facts(
        num_workers=getattr(loader, "num_workers", None),
        batch_size=getattr(loader, "batch_size", None),
        processors=_processors() * trainer.num_nodes // trainer.world_size,
        log_every_n_steps=trainer.log_every_n_steps,
        validations=validations,
        val_interval=_val_interval(trainer),
        epoch_steps=trainer.num_training_batches or math.inf,
        compiles=bool(trainer.compiles_steps or trainer.captures_steps),
        pauses=host_work.pauses,
        reads=host_work.reads,
    )


def _val_interval(trainer: Any) -> int | None:
    steps = trainer.val_check_batch
    changes = trainer.check_val_every_n_epoch not in (None, 1)
    return None if changes or steps is None or math.isinf(steps) else int(steps)


def _processors() -> int:
    # The affinity counts those of this process; not all systems report it.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
