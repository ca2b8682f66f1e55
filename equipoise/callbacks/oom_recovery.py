"""OOMRecovery: the callback that lets a step that ran out of memory run again in micro-batches."""

import warnings
from typing import Any, Literal

from lightning.pytorch import LightningModule

from equipoise.callbacks.callback import Callback
from equipoise.errors import ConfigurationError
from equipoise.memory.out_of_memory import OutOfMemoryEvent, Split
from equipoise.validation import check_whole

__all__ = ["OOMRecovery"]


class OOMRecovery(Callback):
    """Continue training when a batch runs out of memory.

    The step is repeated from its start, with the batch in 2, 4, 8, … micro-batches, down to one sample each.
    Gradients are those of the whole batch, however it is split; no sample is lost, and logs and random numbers of the
    failed attempt are undone. The size that worked is used again for batches of that kind, and a size twice as large is
    tried after some good steps.

    BatchNorm computes the statistics of each micro-batch separately. Dropout draws for each micro-batch, so a step that
    is split draws other numbers than one that is not.

    Args:
        policy: "split": as above. "skip": the batch is left out, counted and reported. "raise": an error that says
            what would help. Default: "split".
        grow_after: Number of good steps after which a larger size is tried; it doubles each time that fails. Default:
            100.
        most_skipped: With "skip": maximum number of batches left out in a run, by one process. One more is an error.
            Default: 10.

    Attributes:
        events: An `OutOfMemoryEvent` for each failed attempt, in order: those of this process, and from the end of
            training on those of all processes.
        skipped: Number of batches left out, counted likewise.

    Raises:
        ConfigurationError: If an argument is invalid, or in Lightning's Trainer, which does not report errors of memory
            to its callbacks.

    Example:
        >>> from equipoise import OOMRecovery, Trainer
        >>> trainer = Trainer(callbacks=[OOMRecovery()], logger=False, enable_checkpointing=False)
    """

    def __init__(
        self, policy: Literal["split", "skip", "raise"] = "split", *, grow_after: int = 100, most_skipped: int = 10
    ) -> None:
        if policy not in ("split", "skip", "raise"):
            raise ConfigurationError(f"policy must be 'split', 'skip' or 'raise', not {policy!r}.")
        check_whole("grow_after", grow_after, least=0)
        check_whole("most_skipped", most_skipped, least=0)
        self.policy = policy
        self.grow_after = grow_after
        self.most_skipped = most_skipped
        self.events: list[OutOfMemoryEvent] = []
        self.skipped = 0
        # Numbers of events and of batches left out before this run.
        self._earlier_events = 0
        self._earlier_skipped = 0

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Note the counts at the start of the run.

        Raises:
            ConfigurationError: If the trainer is Lightning's.
        """
        # Only strategies of Equipoise have this method.
        if not hasattr(trainer.strategy, "gather_objects"):
            raise ConfigurationError(
                "OOMRecovery works in equipoise.Trainer only: Lightning's Trainer does not ask its callbacks when"
                " memory runs out. Take equipoise.Trainer, or leave the callback out."
            )
        self._earlier_events = len(self.events)
        self._earlier_skipped = self.skipped

    def on_out_of_memory(self, trainer: Any, pl_module: LightningModule, event: OutOfMemoryEvent) -> Split | None:
        """Decide by the policy; see `Callback.on_out_of_memory`."""
        self.events.append(event)
        if self.policy == "raise" or not event.can_repeat:
            return None
        # A step of the optimiser is repeated under both other policies.
        if event.phase == "optimizer step":
            _warn(f"{event} It is done once more.")
            return Split(1)
        if self.policy == "skip" and event.phase in ("forward", "backward"):
            return self._skip(event)
        if self.policy == "split":
            return self._split(event)
        return None

    def _skip(self, event: OutOfMemoryEvent) -> Split | None:
        """Leave the batch out; None if too many were."""
        self.skipped += 1
        skipped = self.skipped - self._earlier_skipped
        if skipped > self.most_skipped:
            return None
        _warn(f"{event} It is left out; {skipped} so far.")
        return Split(0)

    def _split(self, event: OutOfMemoryEvent) -> Split | None:
        """Double the number of micro-batches; None if they have one sample each already."""
        if event.parts >= event.most_parts:
            return None
        parts = min(2 * event.parts, event.most_parts)
        _warn(f"{event} It is computed in {parts} parts.")
        return Split(parts, self.grow_after)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Gather the events and counts of all processes."""
        if trainer.world_size == 1:
            return
        # 1. Exchange those of this run.
        events = self.events[self._earlier_events :]
        gathered = trainer.strategy.gather_objects((events, self.skipped - self._earlier_skipped))
        # 2. Join them in the order of steps and times.
        all_events: list[OutOfMemoryEvent] = []
        all_skipped = 0
        for events_of_rank, skipped_of_rank in gathered:
            all_events += events_of_rank
            all_skipped += skipped_of_rank
        all_events.sort(key=_step_and_time)
        self.events[self._earlier_events :] = all_events
        self.skipped = self._earlier_skipped + all_skipped


def _step_and_time(event: OutOfMemoryEvent) -> tuple[int, float]:
    return event.step, event.seconds


def _warn(message: str) -> None:
    """Warn in every process: each knows only its own events."""
    warnings.warn(message, stacklevel=2)
