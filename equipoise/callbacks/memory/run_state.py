"""State of the memory logger during one run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from lightning.pytorch import LightningModule
from torch.optim import Optimizer

from equipoise.callbacks.memory.phase_readings import ByPhase, Readings, larger
from equipoise.interop.distributed.whole_weights import whole_weights
from equipoise.memory.profile.ledger import Ledger

__all__ = ["RunState"]

# Number of optimiser steps after which the leak watch starts once more, for growth that began later.
_FIRST_LEAK_CHECK = 100


@dataclass
class RunState:
    """State of one run; without arguments, that between two runs.

    Attributes:
        readings: Reads the devices.
        detail_steps: Steps that are still to be examined in detail.
        leaks: The leak watch of the extension that finds leaks; None without it.
        batches: Number of training batches so far.
        batch_begun: True if `batches` counts the present batch already.
        largest: Largest readings of the epoch, for the main process.
        epoch_start: Time of `time.monotonic` at the start of the epoch.
        ledger: Ledger of the step that is examined in detail.
        ledger_step: Number of that step.
        step: `trainer.global_step` before the batch.
        next_leak_check: Step from which the leak watch starts again.
        busy: True while every batch is examined, not only one in `every_n_steps`.
    """

    readings: Readings = field(default_factory=lambda: Readings([]))
    detail_steps: list[int] = field(default_factory=list)
    leaks: Any = None
    batches: int = 0
    batch_begun: bool = False
    largest: ByPhase = field(default_factory=dict)
    epoch_start: float = 0.0
    ledger: Ledger | None = None
    ledger_step: int = 0
    step: int = 0
    next_leak_check: int = _FIRST_LEAK_CHECK
    busy: bool = True

    def start_training(self, step: int) -> None:
        """Note the step and the time at which training starts."""
        self.step = step
        self.start_epoch()

    def start_epoch(self) -> None:
        """Note the time at which an epoch starts."""
        self.epoch_start = monotonic()

    def begin_reading(self, step: int) -> None:
        """Note the step of a batch whose phases are read, and reset the peaks."""
        self.step = step
        self.readings.reset()

    def begin_batch(self) -> None:
        """Count a batch."""
        self.batch_begun = True
        self.batches += 1

    def advance(self, step: int) -> bool:
        """Note the step after a batch; return True if an optimiser has stepped."""
        has_stepped = step != self.step
        self.step = step
        return has_stepped

    def add_to_epoch(self, readings: ByPhase) -> None:
        """Merge readings into the largest of the epoch."""
        for key, reading in readings.items():
            self.largest[key] = larger(self.largest.get(key), reading)

    def take_largest(self) -> ByPhase:
        """Return the largest readings of the epoch, and forget them."""
        largest = self.largest
        self.largest = {}
        return largest

    def begin_detail(self, step: int, module: LightningModule, optimizers: Sequence[Optimizer]) -> Ledger:
        """Start to record a step in detail."""
        self.ledger_step = step
        self.detail_steps = [later for later in self.detail_steps if later > step]
        weights = whole_weights(module)
        self.ledger = Ledger(module, optimizers, watches_sizes=weights is not None)
        self.ledger.start()
        self.ledger.add_gathered(weights or ())
        return self.ledger

    def end_detail(self) -> Ledger | None:
        """Stop recording, and return the ledger; None if no step was recorded."""
        ledger = self.ledger
        self.ledger = None
        if ledger is not None:
            ledger.stop()
        return ledger

    def is_leak_check_due(self, step: int) -> bool:
        """Return True if the leak watch should start again. The steps between two checks double."""
        if self.leaks is None or step < self.next_leak_check:
            return False
        self.next_leak_check = 2 * step
        return bool(self.leaks.is_worth_it())

    def watch_leaks(self, leaks: Any) -> None:
        """Set the watch for growth."""
        self.leaks = leaks

    def stop_leaks(self) -> None:
        """Stop watching for growth."""
        if self.leaks is not None:
            self.leaks.stop()
            self.leaks = None

    def update_busy(self) -> None:
        """Decide again whether every batch is examined."""
        # The leak watch examines the first steps only.
        watches_steps = self.leaks is not None and self.leaks.watches_steps
        self.busy = bool(self.detail_steps) or self.ledger is not None or watches_steps
