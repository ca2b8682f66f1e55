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

from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.checkpoint_hooks import finish_save
from equipoise.interop.metrics import load_metric_states
from equipoise.interop.module_metrics import named_metrics
from equipoise.notices import rank_zero_warn
from equipoise.parallel.communication.processes import Processes
from equipoise.parallel.snapshot import random_state
from equipoise.parallel.snapshot.plain.copies import copied
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.checkpointing.entry_checks import loading
from equipoise.trainer.checkpointing.layout import OUR_KEY
from equipoise.trainer.data.batch_stream import NOTHING
from equipoise.trainer.data.loader_state import load_random_state
from equipoise.trainer.evaluation.evaluation_step import Modes, without_gradients
from equipoise.trainer.hooks.hooks import Hooks, state_key_of
from equipoise.trainer.logging.logs import Logs
from equipoise.trainer.loops.fit_state import FitState
from equipoise.trainer.state.run_state import RunState

if TYPE_CHECKING:
    from equipoise.trainer.evaluation.evaluation_loop import EvaluationLoop

__all__ = ["Resumption", "resume"]


def resume(
    state: RunState,
    module: LightningModule,
    strategy: Strategy,
    hooks: Hooks,
    logs: Logs,
    fit: FitState,
    val_loop: "EvaluationLoop",
    loop_state: dict[str, Any],
    ours: dict[str, Any],
) -> "Resumption":
    """Prepare training to continue from a checkpoint, once its counters are loaded; see `FitLoop.resume`."""
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
        position = _position_here(module, strategy.processes, positions)
        rank = strategy.processes.data.rank
        if rank >= len(positions) and not strategy.processes.has_one_state:
            number = rank
    return Resumption(
        state,
        module,
        strategy,
        hooks,
        logs,
        fit,
        val_loop,
        position,
        loop_state,
        written_in=written_in,
        saving_states=ours.get("checkpoint_callbacks"),
        number=number,
    )


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
        state: Contains the settings, counters and optimisers.
        module: The user's module.
        strategy: The strategy.
        hooks: The hooks.
        logs: The logged values.
        fit: The state of training, its counters already those of the checkpoint.
        val_loop: The loop that validates inside the fit.
        position: The position that `position_of` returned; None for a checkpoint of Lightning.
        loop_state: The `fit_loop` entry of the checkpoint, which may hold states of loaders.
        written_in: The hook in which a checkpoint callback wrote the file, and the key of that callback.
        saving_states: The states of the checkpoint callbacks about their files, by their keys. Default: none.
        number: Number by which random generators are separated from those of rank 0; 0: the checkpoint holds those of
            this process. Default: 0.

    Attributes:
        at_epoch_end: Whether a hook of the epoch's end wrote the checkpoint.
        in_epoch: Whether it was written after the start of an epoch and before those hooks.
        batch_unfinished: Whether the work after a batch was not done yet.
        batch_again: Whether a batch was begun and not completed.
        in_validation: Whether a hook of a validation between two batches wrote it.
    """

    def __init__(
        self,
        state: RunState,
        module: LightningModule,
        strategy: Strategy,
        hooks: Hooks,
        logs: Logs,
        fit: FitState,
        val_loop: "EvaluationLoop",
        position: dict[str, Any] | None,
        loop_state: dict[str, Any],
        *,
        written_in: list[str] | None = None,
        saving_states: dict[str, Any] | None = None,
        number: int = 0,
    ) -> None:
        self.state = state
        self.module = module
        self.strategy = strategy
        self.hooks = hooks
        self.logs = logs
        self.fit = fit
        self.val_loop = val_loop
        self.position = position
        self.written_in = written_in
        self.saving_states = saving_states or {}
        self.number = number
        assert fit.hook_state is not None
        self.hook_state = fit.hook_state
        self.loader_states: list[Any] = loop_state["state_dict"].get("combined_loader", [])
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

    def restore_loaders(self) -> None:
        """Restore the epoch in which the training loaders were requested, and the start of their workers."""
        if self.position is None:
            return
        saved = self.position.get("loaders")
        if saved is not None:
            self.fit.data.restore_request(saved["loaded_at"], saved["workers"])

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
            data.resume_stream(self.loader_states, seen, self._batch_ahead())
        else:
            data.resume_stream(self.loader_states, None)

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
            if self.number:
                random_state.fork(self.number)

    def load_logs(self) -> None:
        """Restore the values that the epoch had logged, and the states of the metrics."""
        if self.position is None:
            return
        with loading(OUR_KEY):
            self.logs.load_state_dict(self.position["logs"], self.fit.collection, named_metrics(self.module))
        load_metric_states(self.module, self.position["metrics"])

    def load_gradients(self) -> None:
        """Restore the gradients of an unfinished accumulation window."""
        # There are none between two windows.
        if self.position is not None:
            self.strategy.portable.load_gradients(self.state.optimizers, self.position["gradients"])

    def restore_before_validation(self) -> None:
        """Restore the state before a validation that was killed, which begins anew."""
        if self.position is not None and self.position["before_validation"]:
            before = self.position["before_validation"]
            load_random_state(self.fit.data.flat, before["random_state"])
            load_metric_states(self.module, before["metrics"])
            self.hook_state.restore(before.get("hook_state", {}))

    def end_validation(self) -> None:
        """Run the work that follows a validation whose last hook wrote the checkpoint."""
        if self.position is None:
            return
        state = self.state
        # 1. The checkpoint callbacks after the one that wrote the file, and the module.
        state.begin_validation()
        if self.finish_hook("on_validation_end"):
            self._call_module_in_validation()
        state.end_validation()
        # 2. The metrics that the validation has logged. Training continues with those that it logs, too.
        metrics = named_metrics(self.module)
        trained = {id(entry.metric) for entry in self.fit.collection.entries.values()}
        before = self.position["before_validation"].get("metrics", {})
        states = {}
        for name in self.position["metrics_of_validation"]:
            if name in metrics:
                metrics[name].reset()
                if id(metrics[name]) in trained and name in before:
                    states[name] = before[name]
        load_metric_states(self.module, states)

    def _call_module_in_validation(self) -> None:
        """Call the module's `on_validation_end` with gradients off and in its modes of evaluation."""
        hooks = self.hooks
        call = hooks.bind_module("on_validation_end")
        if call is None:
            return
        with without_gradients(inference_mode=False), Modes(self.module) as modes:
            hooks.call_module("on_validation_model_eval")
            call()
            modes.restore(self.module)

    def end_batch(self, index: int) -> None:
        """Run the rest of `on_train_batch_end`, if a checkpoint callback wrote the file in it.

        Args:
            index: The index of the batch in the epoch.
        """
        name = "on_train_batch_end"
        call = self.hooks.bind_module(name)
        if not self.finish_hook(name, {}, None, index) or call is None or self.position is None:
            return
        arguments = self.position.get("batch_end", [])
        if arguments is None:
            rank_zero_warn(
                f"The resumed run does not call the module's `{name}` of batch {index}, before which its checkpoint was"
                " written: a file holds no batches or outputs other than tensors, numbers, texts and plain containers"
                f" of them. Count and collect in `training_step` or `on_train_epoch_end` instead of `{name}`."
            )
        elif arguments:
            outputs, batch, batch_idx = copied(arguments, self.strategy.root_device)
            self.logs.begin_batch(batch, None, self.fit.data.open_stream.counts.of(index))
            call(outputs, batch, batch_idx)
            self.logs.end_batch()

    def finish_hook(self, name: str, *args: Any) -> bool:
        """Finish the hook in which a checkpoint callback wrote the file, and call that of those after it.

        Args:
            name: The hook. Nothing is called if the file was written in another.
            args: Its arguments.

        Returns:
            True if the file was written in this hook.
        """
        if self.written_in is None or self.written_in[0] != name:
            return False
        hooks = self.hooks
        key = self.written_in[1]
        for callback in hooks.callbacks:
            if state_key_of(callback) == key and hooks.fit is not None:
                finish_save(callback, hooks.trainer, hooks.fit, self.saving_states.get(key, {}))
        call = hooks.bind_checkpoints_after(name, key)
        if call is not None:
            call(*args)
        return True
