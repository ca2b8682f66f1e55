"""Training loaders of a fit: requested, opened for a pass, and continued in a resumed run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.errors import ConfigurationError
from equipoise.formats import counted
from equipoise.notices import rank_zero_warn
from equipoise.strategies.distributed.epoch_length import Certainty, Extent, joined_extent, length_of
from equipoise.strategies.distributed.run_steps import RunSteps
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.data.batch_stream import NOTHING, BatchStream
from equipoise.trainer.data.loader_state import has_state, load_random_state, random_state_of
from equipoise.trainer.data.loaders import Loaders
from equipoise.trainer.state.sent_state import LOCAL, RESULT, SentState

if TYPE_CHECKING:
    from equipoise.trainer.state.run_state import RunState

__all__ = ["TrainingData"]


@dataclass(eq=False)
class TrainingData(SentState):
    """The loaders that training reads, and the stream of the present epoch.

    Attributes:
        loaders: The training loaders; None before they were requested.
        loaded_at: The epoch in which they were requested.
        max_batches: Number of batches of an epoch; infinite if unknown.
        end: Number of batches after which an epoch ends in any case.
        extent: Number of batches of an epoch, of the process that has most of them.
        together: Whether several processes take part in each step.
        stream: The batches of the epoch; None before its order was drawn.
        epoch_random_state: State of every generator before that.
        workers_before_epoch: Generators with which persistent workers had started before that.
        steps: Number and sizes of the run's steps, which stay the same with another number of processes.
    """

    # Another process requests the loaders by itself.
    loaders: Loaders | None = field(default=None, metadata=LOCAL)
    loaded_at: float = -math.inf
    max_batches: float = field(default=math.inf, metadata=RESULT)
    end: float = math.inf
    extent: Extent = field(default_factory=lambda: Extent(math.inf))
    together: bool = False
    stream: BatchStream | None = field(default=None, metadata=LOCAL)
    epoch_random_state: dict[str, Any] = field(default_factory=dict)
    workers_before_epoch: list[Any] = field(default_factory=list)
    steps: RunSteps = field(default_factory=RunSteps, metadata=RESULT)

    # Loaders.

    @property
    def flat(self) -> list[Any]:
        """The loaders, in order."""
        if self.loaders is None:
            return []
        return self.loaders.flat

    @property
    def has_length(self) -> bool:
        """True if all loaders have a length, in all processes."""
        return not math.isinf(self.extent.promised) and all(length_of(loader) is not None for loader in self.flat)

    @property
    def open_stream(self) -> BatchStream:
        """The stream of an epoch whose order was drawn."""
        assert self.stream is not None
        return self.stream

    def is_request_due(self, state: "RunState") -> bool:
        """Return True at first, and every `reload_dataloaders_every_n_epochs`."""
        if state.limit_train_batches == 0:
            return False
        if self.loaders is None:
            return True
        every = state.reload_dataloaders_every_n_epochs
        return every > 0 and state.current_epoch - self.loaded_at >= every

    def request(
        self, state: "RunState", module: LightningModule, strategy: Strategy, request_loaders: Callable[..., Loaders]
    ) -> None:
        """Request the loaders from their source.

        Args:
            state: The settings and counters.
            module: The user's module.
            strategy: The strategy.
            request_loaders: Requests the loaders of a stage; see `RunData.request_loaders`.
        """
        self.loaded_at = state.current_epoch
        overfit = state.overfit_batches > 0
        self.loaders = request_loaders("train", state.limit_train_batches, overfit=overfit, steps=self.steps)
        self.together = strategy.processes.data.world_size > 1
        extents = self.loaders.joint_extents
        self.extent = joined_extent(extents)
        by_hand = strategy.processes.step_together and not module.automatic_optimization
        # A run of few steps may end before some process lacks a batch.
        if self.together and self.extent.certainty is Certainty.AT_REQUEST and state.max_steps == -1:
            from equipoise.strategies.distributed.loaders import refuse_unequal_numbers

            refuse_unequal_numbers(
                [extent.num_batches for extent in extents], by_hand=by_hand, shares_statistics=state.sync_batchnorm
            )
        self.set_max_batches(self.extent.num_batches)

    def set_max_batches(self, max_batches: float) -> None:
        """Set the number of batches after which an epoch ends, though the loaders may promise others."""
        self.max_batches = max_batches
        self.end = max_batches
        if max_batches == self.extent.num_batches:
            self.end = self.extent.limit

    def restore_request(self, loaded_at: float, workers: list[Any]) -> None:
        """Restore the epoch of the last request, and let persistent workers start as in an earlier process."""
        if self.loaders is not None:
            self.loaded_at = loaded_at
            self.loaders.workers.load_state_dict(workers)

    def forget(self) -> None:
        """Forget the loaders, so that they are requested anew."""
        self.loaders = None
        self.loaded_at = -math.inf

    def loader_states(self) -> list[Any]:
        """Return the states of the loaders that have one."""
        return [loader.state_dict() for loader in self.flat if has_state(loader)]

    def workers_before_pass(self) -> list[Any]:
        """Return how persistent workers started, before the pass that a resumed run opens next.

        That may be the present pass.
        """
        if self.stream is not None:
            return self.workers_before_epoch
        if self.loaders is None:
            return []
        return self.loaders.workers.state_dict()

    # The order of an epoch.

    def make_stream(self) -> None:
        """Make a pass over the loaders, without an order yet."""
        assert self.loaders is not None
        self.stream = self.loaders.stream_of_all(self.extent, together=self.together)

    def draw_order(self) -> None:
        """Note the state of every generator, and draw the order of the batches."""
        assert self.loaders is not None
        assert self.stream is not None
        self.epoch_random_state = random_state_of(self.loaders.flat)
        self.workers_before_epoch = self.loaders.workers.state_dict()
        self.stream.start()

    def restore_random_state(self, random_state: dict[str, Any], workers: list[Any]) -> None:
        """Set every generator to its state before the epoch's order was drawn."""
        self.epoch_random_state = random_state
        self.workers_before_epoch = workers
        load_random_state(self.flat, random_state)

    def resume_stream(
        self,
        loader_states: list[Any],
        batches_read: int | None,
        ahead: Any = NOTHING,
        restarts: Sequence[Any] = (),
    ) -> None:
        """Continue the pass of an earlier process.

        Args:
            loader_states: States of the loaders that have one.
            batches_read: Number of batches that were read; None if the epoch had not begun.
            ahead: The batch that had been read ahead, if it is known.
            restarts: The state of `BatchStream.restarts`, if it is known.
        """
        assert self.stream is not None
        stateful = [loader for loader in self.flat if has_state(loader)]
        # A checkpoint of Lightning may lack some of the states.
        for loader, state in zip(stateful, loader_states, strict=False):
            loader.load_state_dict(state)
        if batches_read is None:
            self.stream.start()
        else:
            self.stream.restarts.load_state_dict(restarts)
            self.stream.resume(batches_read, ahead=ahead, stateful=bool(stateful))

    def check_not_empty(self, max_epochs: int | None) -> None:
        """Check that an epoch without batches is not repeated forever.

        Raises:
            ConfigurationError: If there is no batch, and no number of epochs ends the training.
        """
        assert self.stream is not None
        if self.stream.is_empty and max_epochs == -1:
            raise ConfigurationError(
                f"{self.stream.describe_empty()} max_epochs=-1 would repeat empty epochs forever: give a number."
            )

    def close(self) -> None:
        """End the stream, and the workers of the loaders."""
        stream = self.stream
        self.stream = None
        try:
            if stream is not None:
                stream.close()
        finally:
            if self.loaders is not None:
                self.loaders.close()

    # Numbers.

    def estimated_steps(self, state: "RunState") -> int | float:
        """Return the number of optimiser steps of the whole training, as far as it can be known."""
        if state.max_epochs == -1:
            return math.inf if state.max_steps == -1 else state.max_steps
        if math.isinf(self.max_batches):
            return state.max_steps
        steps_of_epoch = math.ceil(self.max_batches / state.accumulate_grad_batches)
        steps = steps_of_epoch * max(state.max_epochs or 0, 1)
        if state.max_steps == -1:
            return steps
        return min(steps, state.max_steps)

    def report_long_window(self, state: "RunState") -> None:
        """Say that an accumulation window is longer than an epoch, at whose end the optimiser steps in any case."""
        window = state.accumulate_grad_batches
        if window > self.max_batches and not state.fast_dev_run:
            rank_zero_info(
                f"accumulate_grad_batches={window}, but an epoch has {self.max_batches} batches: gradients are not"
                " accumulated over epochs, so the optimiser steps once, at the end of each epoch."
            )

    def warn_of_rare_logs(self, state: "RunState") -> None:
        """Warn if an epoch is too short for values of steps to reach the loggers."""
        if not state.loggers or state.fast_dev_run:
            return
        if self.max_batches < state.log_every_n_steps:
            batches = counted(int(self.max_batches), "batch", "batches")
            rank_zero_warn(
                f"An epoch has {batches}, fewer than log_every_n_steps={state.log_every_n_steps}."
                " Set a lower value if you want to see logs of the training epoch."
            )
