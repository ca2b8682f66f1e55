"""Resume a fit from a checkpoint, anywhere in an epoch, as if the run had never ended.

Lightning's counters tell in which hook a checkpoint was written. What they do not tell, ours do under the key
"equipoise": the state of every RNG, then and when the epoch began; the gradients of an unfinished accumulation
window; and what the epoch has logged so far. A checkpoint of Lightning lacks these: then batches are skipped in the
order in which the loader gives them now.

    written in                    remains to be done
    on_train_epoch_start          the whole epoch
    training_step and around it   that batch, again
    on_train_batch_end            what follows a batch (validation, ...), the rest of the epoch
    a hook of validation          that validation unless it was at its end, the rest of the epoch
    on_train_epoch_end            schedulers that watch a value of the epoch, and its row in the loggers
    the end of a fit              on_train_end, unless it had been fired
    or after it                   the rest of an epoch that max_steps had cut short, if the limits now allow more
"""

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from torchmetrics import Metric

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.classes import takes_iterator
from equipoise.interop.metrics import load_metric_states, metric_states
from equipoise.parallel.optimizer_parameters import optimizer_parameters
from equipoise.trainer.checkpointing.file import is_plain
from equipoise.trainer.data.batch_stream import NOTHING, BatchStream
from equipoise.trainer.data.loader_state import has_state, load_random_state, random_state_of
from equipoise.trainer.hooks.hooks import state_key_of
from equipoise.trainer.loops.after_batch import AfterBatch
from equipoise.trainer.loops.iterator_epoch import run_epoch

if TYPE_CHECKING:
    from equipoise.trainer.loops.fit_loop import FitLoop
    from equipoise.trainer.trainer import Trainer

__all__ = ["Resumption", "before_validation", "flat_loaders", "leave_epoch", "position_of", "resume"]


def position_of(loop: "FitLoop") -> dict[str, Any]:
    """What a checkpoint needs, beside the counters, to go on exactly.

    Args:
        loop: The training loop, at any moment.
    """
    window, optimizers = loop.window, loop.trainer.optimizers
    parameters = [p for optimizer in optimizers for p in optimizer_parameters(optimizer)] if window.is_open else []
    names = {id(child): name for name, child in loop.context.module.named_modules()}
    validated = (entry.metric for entry in loop.val_loop.collection.entries.values())
    return {
        "random_state": random_state_of(flat_loaders(loop)),
        "epoch_random_state": loop.epoch_random_state,
        "order_drawn": loop.stream is not None,
        "pulled": loop.progress.pulled.state_dict() if takes_iterator(loop.context.module, "training_step") else None,
        "ahead": _kept(loop.stream),
        "window": window.state_dict(),
        "gradients": [p.grad for p in parameters],
        "logs": loop.context.logs.state_dict(loop.collection, names),
        "metrics": metric_states(loop.context.module),
        "metrics_of_validation": [names[id(metric)] for metric in validated if id(metric) in names],
        "before_validation": loop.before_validation,
        "loaders": {"loaded_at": loop.loaded_at, "workers": _workers_before_pass(loop)},
        "val_loaders": loop.val_loop.loaders_state(),
        "stopped_by": _stopped_by(loop),
        "has_ended": loop.has_ended,
    }


def _workers_before_pass(loop: "FitLoop") -> list[Any]:
    """How persistent workers started, before the pass that a resumed run opens next, which may be the present one."""
    if loop.stream is not None:
        return loop.workers_before_epoch
    return loop.loaders.workers.state_dict() if loop.loaders is not None else []


def _stopped_by(loop: "FitLoop") -> list[str]:
    """The keys of the callbacks that have stopped the run early."""
    if not loop.trainer.should_stop:
        return []
    stoppers = [callback for callback in loop.trainer.callbacks if isinstance(callback, EarlyStopping)]
    return [callback.state_key for callback in stoppers if callback.stopping_reason != EarlyStoppingReason.NOT_STOPPED]


def leave_epoch(loop: "FitLoop") -> dict[str, Any]:
    """What a run with higher limits needs to go on in the midst of an epoch which this run leaves there.

    Args:
        loop: The training loop, after the last batch and before the hooks of the epoch's end.
    """
    position = position_of(loop)
    position["batch_is_done"] = True
    for name in ("logs", "gradients"):  # these go on changing
        position[name] = deepcopy(position[name])
    return {"loop": loop.state_dict(), "positions": loop.context.strategy.processes.gather_objects(position)}


def _kept(stream: BatchStream | None) -> list[Any]:
    """The batch that was read ahead, if a file can hold it: it cannot be read again as it was."""
    return [stream.ahead] if stream is not None and stream.ahead is not NOTHING and is_plain(stream.ahead) else []


def flat_loaders(loop: "FitLoop") -> list[Any]:
    """The training loaders, in order."""
    return loop.loaders.flat if loop.loaders is not None else []


def before_validation(loop: "FitLoop") -> dict[str, Any]:
    """What a validation that is killed in its midst changes, to begin it anew."""
    return {
        "random_state": random_state_of(flat_loaders(loop)),
        "metrics": metric_states(loop.context.module),
        "val_loaders": loop.val_loop.loaders_state(),
    }


def restore_before_validation(loop: "FitLoop", state: dict[str, Any]) -> None:
    """Sets back what `before_validation` took."""
    load_random_state(flat_loaders(loop), state["random_state"])
    load_metric_states(loop.context.module, state["metrics"])


def resume(loop: "FitLoop", loop_state: dict[str, Any], ours: dict[str, Any]) -> None:
    """Lets the training loop go on from a checkpoint, once its counters are loaded.

    Args:
        loop: The training loop.
        loop_state: The `fit_loop` entry of the checkpoint.
        ours: What the checkpoint holds under our own key; empty for a checkpoint of Lightning.

    Raises:
        ConfigurationError: If another number of processes wrote it in the midst of an epoch.
    """
    trainer, strategy = loop.trainer, loop.context.strategy
    position, positions = ours.get("position"), ours.get("positions", [])
    if position is not None and _was_stopped(trainer, position.get("stopped_by", [])):
        trainer.should_stop = True
    loop.left = ours.get("left")
    limit_is_reached = 0 <= trainer.max_steps <= trainer.global_step or trainer.should_stop
    written_in = ours.get("written_in")
    if loop.left is not None and not limit_is_reached:
        loop_state, positions = loop.left["loop"], loop.left["positions"]
        loop.progress.load_state_dict(loop_state)
        position = positions[0]
        written_in = None  # that hook comes again, at the end of the epoch
    if len(positions) == strategy.processes.world_size:
        position = positions[strategy.processes.rank]
    loop.resumption = Resumption(loop, position, loop_state, written_in)
    written_by, processes = len(positions) or 1, strategy.processes.world_size
    if position is not None and written_by != processes and loop.resumption.in_epoch and not loop.batches_done():
        raise ConfigurationError(
            f"The checkpoint was written in the middle of an epoch by {written_by} processes, and there are {processes}"
            f" now: some samples of the epoch would be lost, others seen twice. Resume with {written_by}, or from a"
            " checkpoint of an epoch's end."
        )


def _was_stopped(trainer: "Trainer", stopped_by: list[str]) -> bool:
    """Whether early stopping had ended the run, and is still among the callbacks."""
    present = {state_key_of(callback) for callback in trainer.callbacks}
    return bool(stopped_by) and present.issuperset(stopped_by)


class Resumption:
    """Goes on from a checkpoint; lives until the epoch in which it was written has ended.

    Args:
        loop: The training loop, its counters already those of the checkpoint.
        position: What `position_of` returned; None for a checkpoint of Lightning.
        loop_state: The `fit_loop` entry of the checkpoint, which may hold states of loaders.
        written_in: The hook in which a checkpoint callback wrote the file, and the key of that callback.
    """

    def __init__(
        self,
        loop: "FitLoop",
        position: dict[str, Any] | None,
        loop_state: dict[str, Any],
        written_in: list[str] | None = None,
    ) -> None:
        self.loop = loop
        self.position = position
        self.written_in = written_in
        self.loader_states: list[Any] = loop_state["state_dict"].get("combined_loader", [])
        epoch, batch = loop.progress.epoch.current, loop.progress.batch.current
        self.at_epoch_end = epoch.processed > epoch.completed
        self.in_epoch = epoch.started > epoch.processed
        self.batch_unfinished = batch.processed > batch.completed
        # Ready and completed are equal from a batch's last hook to the next batch: a hook of validation wrote the
        # checkpoint.
        self.in_validation = not self.batch_unfinished and batch.ready == batch.completed > 0
        if position is not None and position.get("batch_is_done", False):
            self.in_validation = False
        self.batch_again = self.in_epoch and not self.batch_unfinished and batch.ready > batch.completed
        pulled = position.get("pulled") if position is not None else None
        if pulled is not None:
            loop.progress.pulled.load_state_dict(pulled)
        if not self.in_epoch and not self.at_epoch_end:
            epoch.set(epoch.completed)
        elif self.batch_again:
            loop.progress.rewind()
        if pulled is None:  # the loop read the batches, one for each step
            loop.progress.pulled.current.set(batch.ready)
        if position is not None:
            loop.window.load_state_dict(position["window"])
            loop.has_ended = position.get("has_ended", False)
            loop.val_loop.resumed = position.get("val_loaders")
            if self.in_validation and not self._has_validated():
                loop.val_loop.resumed = position["before_validation"].get("val_loaders")

    def _has_validated(self) -> bool:
        """Whether the validation in one of whose hooks the checkpoint was written was at its end."""
        val = self.loop.progress.val_batch
        return val.is_last_batch and val.current.completed == val.current.ready

    @property
    def is_after_batch(self) -> bool:
        """Whether something remains of a batch that is done, such as its validation, though a limit may be reached."""
        return self.position is not None and self.in_epoch and (self.batch_unfinished or self.in_validation)

    @property
    def lacks_end(self) -> bool:
        """Whether `on_train_end` was not fired before the checkpoint was written; one of Lightning does not say."""
        return self.position is not None and not self.loop.has_ended

    def is_finished(self) -> bool:
        """Whether nothing is left to train, once the epoch at whose end the checkpoint was written is closed."""
        self.restore_loaders()
        if self.at_epoch_end:
            self.finish_epoch()
        return not self.is_after_batch and self.loop.done()

    def restore_loaders(self) -> None:
        """Tells the training loaders when they were asked for, and how their workers started."""
        saved = self.position.get("loaders") if self.position is not None else None
        if saved is not None and self.loop.loaders is not None:
            self.loop.loaded_at = saved["loaded_at"]
            self.loop.loaders.workers.load_state_dict(saved["workers"])

    def start_stream(self, stream: BatchStream) -> None:
        """Reads on in the epoch: every RNG as before its order was drawn, past the batches that were seen."""
        loop, seen = self.loop, self._batches_seen()
        assert loop.loaders is not None
        if self.position is not None:
            loop.epoch_random_state = self.position["epoch_random_state"]
            loop.workers_before_epoch = self.position.get("loaders", {}).get("workers", [])
            load_random_state(loop.loaders.flat, loop.epoch_random_state)
        if stateful := [loader for loader in loop.loaders.flat if has_state(loader)]:
            for loader, state in zip(stateful, self.loader_states, strict=False):
                loader.load_state_dict(state)
        if self.in_epoch:
            ahead = self.position["ahead"] if self.position is not None and not self.batch_again else []
            stream.resume(seen, ahead=ahead[0] if ahead else NOTHING, stateful=bool(stateful))
        else:
            stream.start()

    def _batches_seen(self) -> int:
        """The number of batches of the epoch that were read, be it by the loop or by the training step."""
        progress = self.loop.progress
        steps, pulled = progress.batch.current.ready, progress.pulled.current.ready
        if self.in_epoch and steps != pulled and not takes_iterator(self.loop.context.module, "training_step"):
            raise ConfigurationError(
                f"The checkpoint was written in the middle of an epoch, after {steps} steps of a"
                f" `training_step(dataloader_iter)` that had pulled {pulled} batches; one that takes a batch cannot go"
                " on there. Resume with a `training_step(dataloader_iter)`, or from a checkpoint of an epoch's end."
            )
        return pulled

    def finish_epoch(self) -> None:
        """Does what remained of an epoch whose last hook wrote the checkpoint."""
        loop, epoch = self.loop, self.loop.progress.epoch.current
        if self.position is not None:
            self._load_logs(self.position)
            loop.context.logs.end_batches()
            load_random_state(flat_loaders(loop), self.position["random_state"])
            loop.load_validation_data()  # checkpoint callbacks ask how many batches there are
            self._finish_hook("on_train_epoch_end")
            loop.hand_on_epoch()
        epoch.completed = epoch.processed

    def _finish_hook(self, name: str, *args: Any) -> None:
        """Lets the checkpoint callbacks behind the one that wrote the file do their part of its hook."""
        if self.written_in is None or self.written_in[0] != name:
            return
        if fire := self.loop.context.hooks.bind_checkpoints_after(name, self.written_in[1]):
            fire(*args)

    def go_on(self) -> None:
        """Does what remained of a batch one of whose hooks wrote the checkpoint, and of its epoch."""
        loop, position = self.loop, self.position
        if position is not None and not self.at_epoch_end:
            self._load_logs(position)
            loop.context.logs.in_batches = self.in_epoch and loop.progress.batch.current.ready > 0
        if self.in_epoch:
            loop.begin_epoch()
            self._load_gradients()
        elif position is not None and position["order_drawn"]:
            loop.start_stream()  # that of the first epoch is drawn before on_train_epoch_start
        if position is not None:
            load_random_state(flat_loaders(loop), position["random_state"])
        if self.in_epoch:
            if not self._finish_batch():
                run_epoch(loop)
            loop.end_epoch()

    def _finish_batch(self) -> bool:
        """What follows the last batch; returns whether the epoch ends with it."""
        loop, batch = self.loop, self.loop.progress.batch
        index, ends = batch.current.ready - 1, self.loop.batches_done()
        pulled = loop.progress.pulled.current
        step_was_left = pulled.ready > pulled.completed  # it wanted more batches than there are
        last = not step_was_left and (ends or (index + 1) % loop.trainer.accumulate_grad_batches == 0)
        if self.batch_unfinished:
            self._finish_hook("on_train_batch_end", {}, None, index)
            batch.current.set(index + 1)
            return AfterBatch(loop)(index, last, ends)
        if not self.in_validation:
            return False
        validated = self._has_validated()
        if not validated and self.position is not None and self.position["before_validation"]:
            restore_before_validation(loop, self.position["before_validation"])
        elif validated and self.position is not None:
            loop.trainer.validating = True
            self._finish_hook("on_validation_end")
            loop.trainer.training = True
            self._end_validation(self.position)
        return AfterBatch(loop)(index, last, ends, write=False, validate=not validated)

    def _end_validation(self, position: dict[str, Any]) -> None:
        """Resets the metrics of a validation that was at its end, as it would have done next."""
        for name in position["metrics_of_validation"]:
            metric = dict(self.loop.context.module.named_modules()).get(name)
            if isinstance(metric, Metric):
                metric.reset()

    def _load_logs(self, position: dict[str, Any]) -> None:
        """Takes back what the epoch had logged so far."""
        loop, module = self.loop, self.loop.context.module
        loop.context.logs.load_state_dict(position["logs"], loop.collection, dict(module.named_modules()))
        load_metric_states(module, position["metrics"])

    def _load_gradients(self) -> None:
        """Takes back the gradients of an unfinished accumulation window."""
        gradients = self.position["gradients"] if self.position is not None else []
        parameters = [p for optimizer in self.loop.trainer.optimizers for p in optimizer_parameters(optimizer)]
        for parameter, gradient in zip(parameters, gradients, strict=False):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
