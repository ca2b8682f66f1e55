"""Decide whether training ends: limits, `trainer.should_stop`, and signals."""

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.formats import format_path
from equipoise.notices import rank_zero_warn
from equipoise.parallel.communication.processes import Processes
from equipoise.trainer.loops.fit_state import FitState
from equipoise.trainer.runtime.continuing import newest_saved
from equipoise.trainer.runtime.signals import EndOnSignal
from equipoise.trainer.state.progress import Progress
from equipoise.trainer.state.run_state import RunState

__all__ = ["Stopping"]


class Stopping:
    """Decides when training ends.

    Args:
        state: The limits, and the requests to stop.
        module: The user's module.
        processes: The processes of the run.
        fit: The state of training.
        end: Ends the run after a signal.

    Attributes:
        end_on_signal: Ends the run here, once a signal came and all processes end after the same batch.
    """

    def __init__(
        self, state: RunState, module: LightningModule, processes: Processes, fit: FitState, end: EndOnSignal
    ) -> None:
        self.state = state
        self.module = module
        self.processes = processes
        self.fit = fit
        self.end_on_signal = end.in_training
        # The name of the limit that is reached.
        self._limit = ""

    @property
    def steps(self) -> Progress:
        """The counter of optimiser steps."""
        return self.fit.progress.steps(automatic=self.module.automatic_optimization)

    @property
    def global_step(self) -> int:
        """Number of optimiser steps done."""
        return self.steps.completed

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
        if not self._limit:
            return
        rank_zero_info(f"`Trainer.fit` stopped: `{self._limit}={getattr(self.state, self._limit)}` reached.")
        newest = newest_saved(self.state.callbacks)
        if newest is not None:
            rank_zero_info(f"A larger {self._limit} with ckpt_path='{format_path(str(newest))}' continues the fit.")

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

    def share_request(self) -> None:
        """Let all processes know if a hook of the batch, which only some of them called, has asked training to stop."""
        # The epoch has loaded it: no other step is uneven.
        from equipoise.parallel.communication.agreements import is_true_in_any

        state = self.state
        if is_true_in_any(state.should_stop, self.processes) and not state.should_stop:
            state.should_stop = True

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
