"""Decide whether training ends: limits, and `trainer.should_stop`."""

from typing import TYPE_CHECKING

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.trainer.loops.fit_state import FitState

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext

__all__ = ["Stopping"]


class Stopping:
    """Decides when training ends.

    Args:
        context: The run.
        fit: The state of training.
    """

    def __init__(self, context: "RunContext", fit: FitState) -> None:
        self.context = context
        self.state = context.state
        self.fit = fit
        self._notice = ""

    def is_over(self) -> bool:
        """Return True if training ends here, between two epochs."""
        state = self.state
        epoch = self.fit.progress.epoch.current
        # 1. The limits.
        if 0 <= state.max_steps <= self.context.global_step:
            self._notice = f"`Trainer.fit` stopped: `max_steps={state.max_steps}` reached."
            return True
        if state.max_epochs is not None and 0 <= state.max_epochs <= epoch.processed:
            epoch.complete()
            self._notice = f"`Trainer.fit` stopped: `max_epochs={state.max_epochs}` reached."
            return True
        # 2. A request to stop.
        return bool(state.should_stop) and self.can_stop_early()

    def say_why(self) -> None:
        """Report the limit that has ended training, if one has."""
        if self._notice:
            rank_zero_info(self._notice)

    def can_stop_early(self) -> bool:
        """Return True if `min_epochs` and `min_steps` are reached."""
        state = self.state
        enough_epochs = self.fit.progress.epoch.current.processed >= (state.min_epochs or 0)
        return enough_epochs and self.context.global_step >= (state.min_steps or 0)

    def may_stop(self) -> bool:
        """Return True if training may end after a request to stop; if it may not, report that once."""
        if self.can_stop_early():
            return True
        if self.fit.note_wait():
            rank_zero_info(
                f"The Trainer was asked to stop, but min_epochs={self.state.min_epochs} or"
                f" min_steps={self.state.min_steps} is not met yet: it goes on."
            )
        return False
