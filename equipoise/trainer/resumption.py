"""Going on from a checkpoint, wherever in an epoch it was written, as if the run had never ended.

Lightning's counters tell in which hook a checkpoint was written. What they do not tell, ours do under the key
"equipoise": the state of every RNG, then and when the epoch began; the gradients of an unfinished accumulation
window; and what the epoch has logged so far. A checkpoint of Lightning lacks these: then batches are skipped in the
order in which the loader gives them now.

    written in                    remains to be done
    on_train_epoch_start          the whole epoch
    training_step and around it   that batch, again
    on_train_batch_end            what follows a batch (validation, ...), the rest of the epoch
    a hook of validation          that validation unless it was at its end, the rest of the epoch
    on_train_epoch_end            schedulers that watch a value of the epoch
"""

from typing import TYPE_CHECKING, Any

from torchmetrics import Metric

from equipoise.parallel import random_state
from equipoise.strategies.strategy import parameters_of
from equipoise.trainer import interop
from equipoise.trainer.after_batch import AfterBatch
from equipoise.trainer.batch_stream import NOTHING, BatchStream
from equipoise.trainer.checkpoint_file import is_plain
from equipoise.trainer.data import generator_states, has_state, load_generator_states

if TYPE_CHECKING:
    from equipoise.trainer.fit_loop import FitLoop

__all__ = ["Resumption", "before_validation", "position_of", "random_state_of"]


def position_of(loop: "FitLoop") -> dict[str, Any]:
    """What a checkpoint needs, beside the counters, to go on exactly.

    Args:
        loop: The training loop, at any moment.
    """
    window, optimizers = loop.window, loop.trainer.optimizers
    parameters = [p for optimizer in optimizers for p in parameters_of(optimizer)] if window.is_open else []
    names = {id(child): name for name, child in loop.context.module.named_modules()}
    validated = (entry.metric for entry in loop.val_loop.collection.entries.values())
    return {
        "random_state": random_state_of(loop),
        "epoch_random_state": loop.epoch_random_state,
        "order_drawn": loop.stream is not None,
        "ahead": _kept(loop.stream),
        "window": window.state_dict(),
        "gradients": [p.grad for p in parameters],
        "logs": loop.context.logs.state_dict(loop.collection, names),
        "metrics": interop.metric_states(loop.context.module),
        "metrics_of_validation": [names[id(metric)] for metric in validated if id(metric) in names],
        "before_validation": loop.before_validation,
    }


def _kept(stream: BatchStream | None) -> list[Any]:
    """The batch that was read ahead, if a file can hold it: it cannot be read again as it was."""
    return [stream.ahead] if stream is not None and stream.ahead is not NOTHING and is_plain(stream.ahead) else []


def random_state_of(loop: "FitLoop") -> dict[str, Any]:
    """Every RNG that the next batches depend on."""
    loaders = loop.loaders.flat if loop.loaders is not None else []
    return {"global": random_state.capture().state_dict(), "generators": generator_states(loaders)}


def load_random_state(loop: "FitLoop", state: dict[str, Any]) -> None:
    """Sets every RNG back."""
    if loop.loaders is not None:
        load_generator_states(loop.loaders.flat, state["generators"])
    random_state.RandomState.from_state_dict(state["global"]).restore()


def before_validation(loop: "FitLoop") -> dict[str, Any]:
    """What a validation that is killed in its midst changes, to begin it anew."""
    return {"random_state": random_state_of(loop), "metrics": interop.metric_states(loop.context.module)}


def restore_before_validation(loop: "FitLoop", state: dict[str, Any]) -> None:
    """Sets back what `before_validation` took."""
    load_random_state(loop, state["random_state"])
    interop.load_metric_states(loop.context.module, state["metrics"])


class Resumption:
    """Goes on from a checkpoint; lives until the epoch in which it was written has ended.

    Args:
        loop: The training loop, its counters already those of the checkpoint.
        position: What `position_of` returned; None for a checkpoint of Lightning.
        loop_state: The `fit_loop` entry of the checkpoint, which may hold states of loaders.
    """

    def __init__(self, loop: "FitLoop", position: dict[str, Any] | None, loop_state: dict[str, Any]) -> None:
        self.loop, self.position = loop, position
        self.loader_states: list[Any] = loop_state["state_dict"].get("combined_loader", [])
        epoch, batch = loop.progress.epoch.current, loop.progress.batch.current
        self.at_epoch_end = epoch.processed > epoch.completed
        self.in_epoch = epoch.started > epoch.processed
        self.batch_unfinished = batch.processed > batch.completed
        # Ready and completed are equal from a batch's last hook to the next batch: a hook of validation wrote the
        # checkpoint.
        self.in_validation = not self.batch_unfinished and batch.ready == batch.completed > 0
        self.batch_again = self.in_epoch and not self.batch_unfinished and batch.ready > batch.completed
        if not self.in_epoch and not self.at_epoch_end:
            epoch.set(epoch.completed)
        elif self.batch_again:
            loop.progress.rewind()
        if position is not None:
            loop.window.load_state_dict(position["window"])

    def start_stream(self, stream: BatchStream) -> None:
        """Reads on in the epoch: every RNG as before its order was drawn, past the batches that were seen."""
        loop, seen = self.loop, self.loop.progress.batch.current.ready
        assert loop.loaders is not None
        if self.position is not None:
            loop.epoch_random_state = self.position["epoch_random_state"]
            load_random_state(loop, loop.epoch_random_state)
        if stateful := [loader for loader in loop.loaders.flat if has_state(loader)]:
            for loader, state in zip(stateful, self.loader_states, strict=False):
                loader.load_state_dict(state)
        if self.in_epoch:
            ahead = self.position["ahead"] if self.position is not None and not self.batch_again else []
            stream.resume(seen, ahead=ahead[0] if ahead else NOTHING, stateful=bool(stateful))
        else:
            stream.start()

    def finish_epoch(self) -> None:
        """Does what remained of an epoch whose last hook wrote the checkpoint."""
        loop, epoch = self.loop, self.loop.progress.epoch.current
        if self.position is not None:
            self._load_logs(self.position)
            if loop.batches_done():
                loop.schedulers.after_epoch()
            loop.context.logs.reset()
            load_random_state(loop, self.position["random_state"])
        epoch.completed = epoch.processed

    def go_on(self) -> None:
        """Does what remained of a batch one of whose hooks wrote the checkpoint, and of its epoch."""
        loop, position = self.loop, self.position
        if position is not None and not self.at_epoch_end:
            self._load_logs(position)
        if self.in_epoch:
            loop.begin_epoch()
            self._load_gradients()
        elif position is not None and position["order_drawn"]:
            loop.start_stream()  # that of the first epoch is drawn before on_train_epoch_start
        if position is not None:
            load_random_state(loop, position["random_state"])
        if self.in_epoch:
            if not self._finish_batch():
                loop.epoch()
            loop.end_epoch()

    def _finish_batch(self) -> bool:
        """What follows the last batch; returns whether the epoch ends with it."""
        loop, batch = self.loop, self.loop.progress.batch
        index, ends = batch.current.ready - 1, self.loop.batches_done()
        last = ends or (index + 1) % loop.trainer.accumulate_grad_batches == 0
        if self.batch_unfinished:
            batch.current.set(index + 1)
            return AfterBatch(loop)(index, last, ends, write=False)
        if not self.in_validation:
            return False
        val = loop.progress.val_batch
        validated = val.is_last_batch and val.current.completed == val.current.ready
        if not validated and self.position is not None and self.position["before_validation"]:
            restore_before_validation(loop, self.position["before_validation"])
        elif validated and self.position is not None:
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
        interop.load_metric_states(module, position["metrics"])

    def _load_gradients(self) -> None:
        """Takes back the gradients of an unfinished accumulation window."""
        gradients = self.position["gradients"] if self.position is not None else []
        parameters = [p for optimizer in self.loop.trainer.optimizers for p in parameters_of(optimizer)]
        for parameter, gradient in zip(parameters, gradients, strict=False):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
