"""Decide whether training ends: limits, and `trainer.should_stop`."""

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.notices import rank_zero_warn
from equipoise.trainer.loops.fit_state import FitState
from equipoise.trainer.state.run_state import RunState

__all__ = ["Stopping"]


class Stopping:
    """Decides when training ends."""

    def __init__(self, state: RunState, module: LightningModule, fit: FitState) -> None:
        self.state = state
        self.module = module
        self.fit = fit
        # The name of the limit that is reached.
        self._limit = ""

    @property
    def global_step(self) -> int:
        """Number of optimiser steps done."""
        return self.fit.progress.global_step(self.module)

    def is_over(self) -> bool:
        """Return True if training ends here, between two epochs."""
        state = self.state
        epoch = self.fit.progress.epoch.current
        # 1. The limits.
        if 0 <= state.max_steps <= self.global_step:
            self._limit = "max_steps"
            return True
        if state.max_epochs is not None and 0 <= state.max_epochs <= epoch.processed:
            epoch.complete()
            self._limit = "max_epochs"
            return True
        # 2. A request to stop.
        return bool(state.should_stop) and self.can_stop_early()

    def say_why(self) -> None:
        """Report the limit that has ended training, if one has."""
        if self._limit:
            rank_zero_info(f"`Trainer.fit` stopped: `{self._limit}={getattr(self.state, self._limit)}` reached.")

    def warn_of_earlier_fit(self) -> None:
        """Warn that this fit trains nothing, if an earlier one has reached the limit."""
        has_trained = self.fit.progress.epoch.current.processed > 0 or self.global_step > 0
        if self._limit and has_trained:
            rank_zero_warn(
                f"`fit` trains nothing: an earlier fit of this Trainer has reached"
                f" {self._limit}={getattr(self.state, self._limit)}, and its counters continue. Create a new Trainer"
                f" with new callbacks to train a module from the start, or raise `trainer.fit_loop.{self._limit}` to"
                " continue."
            )

    def can_stop_early(self) -> bool:
        """Return True if `min_epochs` and `min_steps` are reached."""
        state = self.state
        enough_epochs = self.fit.progress.epoch.current.processed >= (state.min_epochs or 0)
        return enough_epochs and self.global_step >= (state.min_steps or 0)

    def may_stop(self) -> bool:
        """Return True if training may end after a request to stop; if it may not, report that once."""
        if self.can_stop_early():
            return True
        if self.fit.note_wait():
            rank_zero_info(
                f"The Trainer was asked to stop, but min_epochs={self.state.min_epochs} or"
                f" min_steps={self.state.min_steps} is not met yet: it continues."
            )
        return False
