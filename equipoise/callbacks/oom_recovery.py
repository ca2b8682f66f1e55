"""OOMRecovery: the callback that lets a step that ran out of memory run again in micro-batches."""

import warnings
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import LightningModule

from equipoise.callbacks.callback import Callback
from equipoise.errors import ConfigurationError
from equipoise.memory.out_of_memory import OutOfMemoryEvent, Split
from equipoise.notices import rank_zero_warn

if TYPE_CHECKING:
    from equipoise.trainer.trainer import Trainer

__all__ = ["OOMRecovery"]


class OOMRecovery(Callback):
    """Lets training go on when a batch runs out of memory; in Lightning's own Trainer it can do nothing but warn.

    The step is done again from where it began, the batch in 2, 4, 8, … parts, down to one sample each. Gradients are
    those of the whole batch, whatever its parts; no sample is lost, and what the failed attempt logged or drew is
    forgotten. The size that worked is kept for batches of that kind, and tried twice as large after some good steps.

    BatchNorm computes the statistics of each part apart. Dropout draws part by part, so a step that is cut draws other
    numbers than one that is not.

    Args:
        policy: "split": as told above. "skip": the batch is left out, counted and reported. "raise": an error that says
            what would help. Default: "split".
        grow_after: Good steps after which a larger size is tried; twice as many each time that fails. Default: 100.
        most_skipped: With "skip": more batches in a run, of one process, are an error. Default: 10.

    Attributes:
        events: What happened, in order: an `OutOfMemoryEvent` for each failed attempt; those of this process, and from
            the end of training on those of all.
        skipped: How many batches were left out, counted likewise.

    Raises:
        ConfigurationError: If an argument cannot be right.

    Example:
        >>> from equipoise import OOMRecovery, Trainer
        >>> trainer = Trainer(callbacks=[OOMRecovery()], logger=False, enable_checkpointing=False)
    """

    def __init__(
        self,
        policy: Literal["split", "skip", "raise"] = "split",
        *,
        grow_after: int = 100,
        most_skipped: int = 10,
    ) -> None:
        if policy not in ("split", "skip", "raise"):
            raise ConfigurationError(f"policy must be 'split', 'skip' or 'raise', not {policy!r}.")
        for name, value in (("grow_after", grow_after), ("most_skipped", most_skipped)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigurationError(f"{name} is a whole number from 0, not {value!r}.")
        self.policy, self.grow_after, self.most_skipped = policy, grow_after, most_skipped
        self.events: list[OutOfMemoryEvent] = []
        self.skipped = 0
        self._earlier = (0, 0)  # events and batches left out before this run

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Notes where the run begins; warns where nobody will ask."""
        self._earlier = (len(self.events), self.skipped)
        if not hasattr(trainer.strategy, "gather_objects"):  # a strategy of ours has it
            rank_zero_warn(
                "OOMRecovery does nothing in Lightning's Trainer, which does not ask its callbacks when memory runs"
                " out. Take equipoise.Trainer."
            )

    def on_out_of_memory(self, trainer: "Trainer", pl_module: LightningModule, event: OutOfMemoryEvent) -> Split | None:
        """Decides; see `Callback.on_out_of_memory`."""
        self.events.append(event)
        if self.policy == "raise" or not event.can_repeat:
            return None
        if event.phase == "optimizer step":
            _warn(f"{event} It is done once more.")
            return Split(1)
        if self.policy == "skip" and event.phase in ("forward", "backward"):
            self.skipped += 1
            if (skipped := self.skipped - self._earlier[1]) > self.most_skipped:
                return None
            _warn(f"{event} It is left out; {skipped} so far.")
            return Split(0)
        if self.policy != "split" or event.parts >= event.most_parts:
            return None
        parts = min(2 * event.parts, event.most_parts)
        _warn(f"{event} It is computed in {parts} parts.")
        return Split(parts, self.grow_after)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Learns what happened in the other processes."""
        if trainer.world_size > 1 and hasattr(trainer.strategy, "gather_objects"):  # else it is Lightning's
            events, skipped = self._earlier
            everywhere = trainer.strategy.gather_objects((self.events[events:], self.skipped - skipped))
            known = [event for some, _ in everywhere for event in some]
            self.events[events:] = sorted(known, key=lambda event: (event.step, event.seconds))
            self.skipped = skipped + sum(count for _, count in everywhere)


def _warn(message: str) -> None:
    """Warns in whatever process this is: no other knows."""
    warnings.warn(message, stacklevel=2)
