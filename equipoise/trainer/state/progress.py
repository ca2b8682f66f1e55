"""Progress of a run: counters of epochs, batches and steps, saved in checkpoints.

A counter exists four times, because a checkpoint may be written at any moment: how often something was made ready,
started, processed, and completed with all its hooks. `current` counts since the epoch (or evaluation) began, `total`
since training began. The layout of `state_dict` is that of Lightning's checkpoints, so either reads the other's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import add, sub
from typing import Any

from lightning.pytorch import LightningModule

__all__ = ["BatchProgress", "Counts", "FitProgress", "Progress"]

# Names of the four counts, in the order in which they grow.
_STAGES = ("ready", "started", "processed", "completed")


@dataclass(slots=True)
class Counts:
    """Counts of one unit of work: ready, started, processed and completed."""

    ready: int = 0
    started: int = 0
    processed: int = 0
    completed: int = 0

    def set(self, value: int) -> None:
        """Set all four."""
        self.ready = value
        self.started = value
        self.processed = value
        self.completed = value

    def make_ready(self, number: int = 1) -> None:
        """Count more units that are ready."""
        self.ready += number

    def start(self) -> None:
        """Count one more unit as started."""
        self.started += 1

    def process(self) -> None:
        """Count one more unit as processed."""
        self.processed += 1

    def complete(self) -> None:
        """Count the processed units as completed."""
        self.completed = self.processed

    def reopen(self) -> None:
        """Count the last processed unit as not completed."""
        self.completed = self.processed - 1

    def complete_ready(self) -> None:
        """Count the units that are ready as completed; optimiser steps are neither started nor processed."""
        self.completed = self.ready

    def combine(self, operation: Callable[[int, int], int], other: "Counts") -> "Counts":
        """Return the sum or difference of each count, as a new object."""
        return Counts(*(operation(getattr(self, stage), getattr(other, stage)) for stage in _STAGES))

    def state_dict(self, stages: tuple[str, ...] = _STAGES) -> dict[str, int]:
        """Return the named counts."""
        return {stage: getattr(self, stage) for stage in stages}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Load counts. A count that a shorter counter lacks equals its completed units."""
        completed = state["completed"]
        for stage in _STAGES:
            setattr(self, stage, int(state.get(stage, completed)))


class Progress:
    """A counter with its current and its total counts.

    The loops write `current` only. The total is that of earlier epochs, plus `current`.

    Args:
        stages: The counts that a checkpoint holds.
    """

    __slots__ = ("_before", "current", "stages")

    def __init__(self, stages: tuple[str, ...] = _STAGES) -> None:
        self.stages = stages
        self.current = Counts()
        self._before = Counts()

    @property
    def total(self) -> Counts:
        """Counts since training began."""
        return self._before.combine(add, self.current)

    @property
    def completed(self) -> int:
        """Number of completed units since training began; cheap enough for every step."""
        return self._before.completed + self.current.completed

    def count(self) -> None:
        """Count one unit that is ready and completed immediately."""
        self.current.set(self.current.completed + 1)

    def begin(self) -> None:
        """Begin a new epoch or evaluation; `current` stays the same object."""
        self._before = self.total
        self.current.set(0)

    def rewind(self) -> None:
        """Return to the completed units, after a failure."""
        self.current.set(self.current.completed)

    def forget_total(self) -> None:
        """Set the total to zero, and leave the current counts for those who still read them."""
        self._before = Counts().combine(sub, self.current)

    def state_dict(self) -> dict[str, Any]:
        """Return the current and the total counts."""
        return {"total": self.total.state_dict(self.stages), "current": self.current.state_dict(self.stages)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load both counts."""
        total = Counts()
        total.load_state_dict(state["total"])
        self.current.load_state_dict(state["current"])
        self._before = total.combine(sub, self.current)


class BatchProgress(Progress):
    """A counter of batches, with a flag for the last one of an epoch or evaluation."""

    __slots__ = ("is_last_batch",)

    def __init__(self) -> None:
        super().__init__()
        self.is_last_batch = False

    def begin(self) -> None:
        """Begin a new epoch or evaluation."""
        super().begin()
        self.is_last_batch = False

    def reach(self, index: int, length: float | None) -> None:
        """Count a batch as ready, with those before it, and set whether it is the last.

        Args:
            index: Its index, from 0.
            length: The number of batches; None if it is not known.
        """
        self.current.ready = index + 1
        self.is_last_batch = self.current.ready == length

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and the flag."""
        return {**super().state_dict(), "is_last_batch": self.is_last_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the counts and the flag."""
        super().load_state_dict(state)
        self.is_last_batch = state["is_last_batch"]


@dataclass
class FitProgress:
    """All counters of a training run.

    Attributes:
        epoch: Epochs.
        batch: Batches of the epoch.
        optimizer_step: Optimiser steps in automatic optimisation.
        manual_step: Optimiser steps in manual optimisation, over all optimisers.
        zero_grad: Gradients set to zero, once per accumulation window.
        scheduler: Steps of learning-rate schedulers.
        val_batch: Batches of the validation inside the fit.
        batches_that_stepped: The x-axis of logged values: batches at the end of which an optimiser stepped.
        skipped_steps: Optimiser steps that a scaler has skipped, where schedulers count steps; not in the `fit_loop`
            entry.
    """

    # Counters of batches and epochs.
    epoch: Progress = field(default_factory=Progress)
    batch: BatchProgress = field(default_factory=BatchProgress)

    # Counters of steps. A checkpoint of Lightning holds two or three of their counts.
    optimizer_step: Progress = field(default_factory=lambda: Progress(("ready", "completed")))
    manual_step: Progress = field(default_factory=lambda: Progress(("ready", "completed")))
    zero_grad: Progress = field(default_factory=lambda: Progress(("ready", "completed", "started")))
    scheduler: Progress = field(default_factory=lambda: Progress(("ready", "completed")))

    # Counters for validations and loggers.
    val_batch: BatchProgress = field(default_factory=BatchProgress)
    batches_that_stepped: int = 0
    skipped_steps: int = 0

    def steps(self, *, automatic: bool) -> Progress:
        """Return the counter of optimiser steps for automatic or manual optimisation."""
        return self.optimizer_step if automatic else self.manual_step

    def global_step(self, module: LightningModule) -> int:
        """Return the number of optimiser steps done, over all optimisers; it is not reset.

        Args:
            module: The module, which says whether it optimises by hand.
        """
        return self.steps(automatic=module.automatic_optimization).completed

    def begin_epoch(self) -> None:
        """Set the counts within an epoch to zero."""
        for progress in self._within_epoch():
            progress.begin()
        self.val_batch.forget_total()

    @contextmanager
    def at_last_step(self) -> Iterator[None]:
        """Log values at the last step, where the epoch ended, and not at the next one."""
        self.batches_that_stepped -= 1
        yield
        self.batches_that_stepped += 1

    def rewind(self) -> None:
        """Return to the last completed batch, after a failure or when a checkpoint is resumed."""
        for progress in self._within_epoch():
            progress.rewind()

    def _within_epoch(self) -> tuple[Progress, ...]:
        return (self.batch, self.scheduler, self.optimizer_step, self.zero_grad)

    def state_dict(self) -> dict[str, Any]:
        """Return the `fit_loop` entry of a checkpoint, in Lightning's layout."""
        optimizer = {
            "step": self.optimizer_step.state_dict(),
            "zero_grad": self.zero_grad.state_dict(),
        }
        # Empty entries are those of Lightning's objects without a state; Lightning reads each of them.
        return {
            "state_dict": {},
            "epoch_progress": self.epoch.state_dict(),
            "epoch_loop.state_dict": {"_batches_that_stepped": self.batches_that_stepped},
            "epoch_loop.batch_progress": self.batch.state_dict(),
            "epoch_loop.scheduler_progress": self.scheduler.state_dict(),
            "epoch_loop.automatic_optimization.state_dict": {},
            "epoch_loop.automatic_optimization.optim_progress": {"optimizer": optimizer},
            "epoch_loop.manual_optimization.state_dict": {},
            "epoch_loop.manual_optimization.optim_step_progress": self.manual_step.state_dict(),
            "epoch_loop.val_loop.state_dict": {},
            "epoch_loop.val_loop.batch_progress": self.val_batch.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `fit_loop` entry, ours or Lightning's.

        Raises:
            KeyError: If a counter is missing; Lightning continues silently, with counters of zero.
        """
        optimizer = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
        self.epoch.load_state_dict(state["epoch_progress"])
        self.batch.load_state_dict(state["epoch_loop.batch_progress"])
        self.scheduler.load_state_dict(state["epoch_loop.scheduler_progress"])
        self.optimizer_step.load_state_dict(optimizer["step"])
        self.zero_grad.load_state_dict(optimizer["zero_grad"])
        self.manual_step.load_state_dict(state["epoch_loop.manual_optimization.optim_step_progress"])
        self.val_batch.load_state_dict(state["epoch_loop.val_loop.batch_progress"])
        # Checkpoints of early versions of Lightning lack this entry.
        stepped = state["epoch_loop.state_dict"].get("_batches_that_stepped", 0)
        self.batches_that_stepped = int(stepped)
