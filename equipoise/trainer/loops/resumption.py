"""Resume a fit from a checkpoint, anywhere in an epoch, as if the run had never ended.

A checkpoint of Lightning lacks the position (`position.py`): then batches are skipped in the order in which the loader
yields them now.

    written in                    remains to be done
    on_train_epoch_start          the complete epoch
    training_step and around it   that batch, again
    on_train_batch_end            the module's own, what follows a batch (validation, ...), the rest of the epoch
    a hook of validation          that validation unless it was at its end, the rest of the epoch
    on_train_epoch_end            schedulers that watch a value of the epoch, and its row in the loggers
    the end of a fit              on_train_end, unless it had been called
    or after it                   the rest of an epoch that max_steps had cut short, if the limits now allow more
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.errors import ConfigurationError
from equipoise.parallel.communication.processes import Processes
from equipoise.parallel.snapshot import random_state
from equipoise.trainer.data.batch_stream import NOTHING
from equipoise.trainer.data.loader_state import load_random_state
from equipoise.trainer.hooks.hooks import state_key_of
from equipoise.trainer.loops.cut_hook import CutHook, WrittenIn
from equipoise.trainer.loops.fit_state import FitState
from equipoise.trainer.state.run_state import RunState

if TYPE_CHECKING:
    from equipoise.trainer.evaluation.evaluation_loop import EvaluationLoop

__all__ = ["Resumption", "SavedPosition", "saved_position"]


class SavedPosition(NamedTuple):
    """Where a checkpoint was written, for one process.

    Attributes:
        position: The position that `PositionOfRun` returned; None for a checkpoint of Lightning.
        loader_states: The states of the training loaders that have one.
        written_in: The hook in which a callback wrote the file; None if none did, or it is called again.
        number: Number by which random generators are separated from those of rank 0; 0: the checkpoint holds those of
            this process.
    """

    position: dict[str, Any] | None
    loader_states: list[Any]
    written_in: WrittenIn | None
    number: int


def saved_position(
    state: RunState,
    module: LightningModule,
    processes: Processes,
    fit: FitState,
    loop_state: dict[str, Any],
    ours: dict[str, Any],
) -> SavedPosition:
    """Return where training continues from a checkpoint, once its counters are loaded; see `FitLoop.resume`.

    Early stopping that had ended the run has asked to stop again, and an epoch that a limit has cut short is open.
    """
    # 1. The position of the first process.
    position = ours.get("position")
    positions = ours.get("positions", [])
    written_in = ours.get("written_in")
    stopped_by = [] if position is None else position.get("stopped_by", [])
    # Early stopping had ended the run, and is still among the callbacks.
    if stopped_by and {state_key_of(callback) for callback in state.callbacks}.issuperset(stopped_by):
        state.stop_requests.update(stopped_by)
    # 2. An epoch that a limit has cut short continues there, if the limits now allow it.
    left = fit.left = ours.get("left")
    limit_is_reached = 0 <= state.max_steps <= state.progress.global_step(module) or state.should_stop
    if left is not None and not limit_is_reached:
        loop_state = left["loop"]
        positions = left["positions"]
        fit.progress.load_state_dict(loop_state)
        position = positions[0]
        # That hook is called again, at the end of the epoch.
        written_in = None
    # 3. Each process continues from its own position; another number of processes divide all positions among them.
    number = 0
    if position is not None:
        positions = positions or [position]
        position = _position_here(module, processes, positions)
        rank = processes.data.rank
        if rank >= len(positions) and not processes.has_one_state:
            number = rank
    # 4. The rest of the hook in which the first process wrote the file.
    cut = None
    if position is not None and written_in is not None:
        name, key = written_in
        cut = WrittenIn(name, key, position.get("batch_end", []))
    return SavedPosition(position, loop_state["state_dict"].get("combined_loader", []), cut, number)


def _position_here(
    module: LightningModule, processes_of_run: Processes, positions: list[dict[str, Any]]
) -> dict[str, Any]:
    from equipoise.trainer.runtime.merged_positions import merged_position

    if processes_of_run.has_one_state:
        return positions[0]
    processes = processes_of_run.data
    written_by = len(positions)
    if written_by == processes.world_size:
        return positions[processes.rank]
    if written_by < processes.world_size:
        rank_zero_info(
            f"Ranks from {written_by} on draw new random numbers, which follow from those of rank 0: the checkpoint has"
            " no generators of theirs."
        )
    return merged_position(positions, module, processes.rank, processes.world_size)


class Resumption:
    """Restores the position of a checkpoint. It lives until the epoch in which the file was written has ended.

    Args:
        fit: The state of training, its counters already those of the checkpoint.
        val_loop: The loop that validates inside the fit.
        cut_hook: Finishes the hook in which the file was written.
        saved: Where the checkpoint was written.

    Attributes:
        position: The position that `PositionOfRun` returned; None for a checkpoint of Lightning.
        at_epoch_end: Whether a hook of the epoch's end wrote the checkpoint.
        in_epoch: Whether it was written after the start of an epoch and before those hooks.
        batch_unfinished: Whether the work after a batch was not done yet.
        batch_again: Whether a batch was begun and not completed.
        in_validation: Whether a hook of a validation between two batches wrote it.
    """

    def __init__(self, fit: FitState, val_loop: "EvaluationLoop", cut_hook: CutHook, saved: SavedPosition) -> None:
        self.fit = fit
        self.cut_hook = cut_hook
        self.saved = saved
        position = self.position = saved.position
        assert fit.hook_state is not None
        self.hook_state = fit.hook_state
        # 1. Where the checkpoint was written, by Lightning's counters.
        epoch = fit.progress.epoch.current
        batch = fit.progress.batch.current
        self.at_epoch_end = epoch.processed > epoch.completed
        self.in_epoch = epoch.started > epoch.processed
        self.batch_unfinished = batch.processed > batch.completed
        self.batch_again = self.in_epoch and not self.batch_unfinished and batch.ready > batch.completed
        # Ready and completed are equal from a batch's last hook to the next batch: a hook of validation wrote it,
        # unless a limit has cut the epoch short there.
        between_batches = not self.batch_unfinished and batch.ready == batch.completed > 0
        was_left = position is not None and position.get("batch_is_done", False)
        self.in_validation = between_batches and not was_left
        # 2. Set the counters to where training continues.
        self._restore_counters()
        if position is not None:
            fit.load_position(position)
            val_loaders = position.get("val_loaders")
            if self.in_validation and not self.has_validated():
                val_loaders = position["before_validation"].get("val_loaders")
            val_loop.resumed = val_loaders

    def _restore_counters(self) -> None:
        """Set the counters back to the last batch, or the last epoch, that was completed."""
        progress = self.fit.progress
        epoch = progress.epoch.current
        if not self.in_epoch and not self.at_epoch_end:
            epoch.set(epoch.completed)
        elif self.batch_again:
            progress.rewind()

    def has_validated(self) -> bool:
        """Return True if the validation in one of whose hooks the checkpoint was written was at its end."""
        val_batch = self.fit.progress.val_batch
        return val_batch.is_last_batch and val_batch.current.completed == val_batch.current.ready

    @property
    def is_after_batch(self) -> bool:
        """True if work after a batch remains, such as its validation, even if a limit is reached."""
        return self.position is not None and self.in_epoch and (self.batch_unfinished or self.in_validation)

    @property
    def lacks_end(self) -> bool:
        """True if `on_train_end` was not called before the checkpoint was written. Lightning's do not tell."""
        return self.position is not None and not self.fit.has_ended

    # Data.

    def check_steps(self) -> None:
        """Check that the rest of the epoch has the samples that were not read yet.

        Raises:
            ConfigurationError: If another number of processes wrote the checkpoint, and the loaders cannot keep steps.
        """
        obstacle = self.fit.data.steps.obstacle
        if self.position is None or not obstacle or not self.in_epoch or self.fit.batches_done():
            return
        raise ConfigurationError(
            "The checkpoint was written in the middle of an epoch by another number of processes or another strategy,"
            f" and some samples of the epoch would be lost, others seen twice: {obstacle}. Resume with as many"
            " processes and the same strategy, or from a checkpoint of an epoch's end."
        )

    def request_loaders(self, load_data: Callable[[], None]) -> None:
        """Request the training loaders as the checkpoint's run has: in the same epoch, and from the same state."""
        epoch = self.fit.progress.epoch.current
        present = epoch.completed
        loaded_at = (self.position or {}).get("loaders", {}).get("loaded_at", -math.inf)
        if loaded_at >= 0:
            epoch.completed = loaded_at
        try:
            data = self.fit.data
            # `configure_optimizers` may have requested them, as at the start of a run.
            if self.hook_state.before_request and (data.loaders is None or loaded_at != data.loaded_at):
                data.forget()
                self.hook_state.restore_request()
            load_data()
        finally:
            epoch.completed = present

    def restore_loaders(self) -> None:
        """Restore the epoch in which the training loaders were requested, and the start of their workers."""
        if self.position is None:
            return
        loaders = self.position.get("loaders")
        if loaders is not None:
            self.fit.data.restore_request(loaders["loaded_at"], loaders["workers"])

    def start_stream(self) -> None:
        """Continue the epoch's stream after the batches that were read, every generator as before its order."""
        data = self.fit.data
        seen = self.fit.progress.batch.current.ready
        # 1. Every generator as before the order was drawn.
        if self.position is not None:
            workers = self.position.get("loaders", {}).get("workers", [])
            data.restore_random_state(self.position["epoch_random_state"], workers)
            self.hook_state.restore_order()
        # 2. The order is drawn anew, or its rest read.
        if self.in_epoch:
            restarts = (self.position or {}).get("restarts", [])
            data.resume_stream(self.saved.loader_states, seen, self._batch_ahead(), restarts)
        else:
            data.resume_stream(self.saved.loader_states, None)

    def _batch_ahead(self) -> Any:
        """Return the batch that had been read ahead; `NOTHING` if it is unknown, or is not the next one."""
        if self.position is None or self.batch_again or not self.position["ahead"]:
            return NOTHING
        return self.position["ahead"][0]

    # State of the epoch.

    def load_random_state(self) -> None:
        """Restore every generator to its state when the checkpoint was written."""
        if self.position is not None:
            load_random_state(self.fit.data.flat, self.position["random_state"])
            if self.saved.number:
                random_state.fork(self.saved.number)
