"""When validation runs during training.

With a `val_check_interval` of

- a fraction or a number of batches, it follows each time so many batches of the epoch are done, or so many batches over
  all epochs with `check_val_every_n_epoch=None`;
- 1.0 and loaders without length, it follows the last batch of the epoch;
- a time, it follows the first batch after that time.
"""

import math
import time

from equipoise.strategies.strategy import Strategy
from equipoise.trainer.loops.fit_state import FitState
from equipoise.trainer.loops.stopping import Stopping
from equipoise.trainer.state.run_state import RunState

__all__ = ["ValidationSchedule"]


class ValidationSchedule:
    """Decides after which batches of an epoch validation runs."""

    def __init__(self, state: RunState, strategy: Strategy, fit: FitState, stopping: Stopping) -> None:
        self.state = state
        self.strategy = strategy
        self.fit = fit
        self.stopping = stopping

    @property
    def follows_last_batch(self) -> bool:
        """True if validation follows the last batch of an epoch. The promised number may be wrong."""
        counts_over_epochs = self.state.check_val_every_n_epoch is None
        every = self.fit.val_check_batch
        return every == math.inf or (not counts_over_epochs and every == self.fit.data.max_batches)

    def is_due(self, index: int) -> bool:
        """Return True if validation follows a batch."""
        every = self.fit.val_check_batch
        batch = self.fit.progress.batch
        if self.fit.has_ended_early:
            # Whether an interval was over was examined after the last batch.
            return self.follows_last_batch
        # 1. The epoch's end.
        if batch.is_last_batch and every is not None and math.isinf(every):
            return True
        # 2. The end of training: early stopping needs the values of the present model.
        if self.state.should_stop and self.stopping.can_stop_early():
            return True
        # 3. The interval.
        if every is None:
            return self._is_time()
        if math.isinf(every):
            return self._is_at_limit(index)
        is_fraction = not isinstance(self.state.val_check_interval, int)
        if is_fraction and self.follows_last_batch:
            return batch.is_last_batch
        number = index + 1
        if self.state.check_val_every_n_epoch is None:
            number = batch.total.ready
        return number % int(every) == 0

    def _is_time(self) -> bool:
        """Return True if the time since the last validation has passed; the same in every process."""
        seconds = self.state.val_check_seconds
        assert seconds is not None
        is_due = time.monotonic() - self.fit.last_validation >= seconds
        return self.strategy.processes.broadcast(is_due)

    def _is_at_limit(self, index: int) -> bool:
        limit = self.state.limit_train_batches
        if isinstance(limit, int):
            return (index + 1) % limit == 0
        return self.fit.progress.batch.is_last_batch
