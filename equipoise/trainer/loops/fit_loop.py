"""The training loop: epochs and batches."""

import math
import time
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.errors import ConfigurationError
from equipoise.notices import rank_zero_warn
from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.trainer.data.batch_stream import BatchStream, length_of
from equipoise.trainer.data.loader_state import has_state, random_state_of
from equipoise.trainer.data.loaders import Loaders
from equipoise.trainer.diagnostics.loss_watch import LossWatch
from equipoise.trainer.logging.collection import Collection
from equipoise.trainer.loops.after_batch import AfterBatch
from equipoise.trainer.loops.iterator_epoch import run_epoch
from equipoise.trainer.loops.resumption import Resumption, before_validation, flat_loaders, leave_epoch
from equipoise.trainer.optimization.automatic import AutomaticOptimization, ManualOptimization, make_optimization
from equipoise.trainer.optimization.batch_weight import BatchWeight
from equipoise.trainer.optimization.optimizers import Schedulers
from equipoise.trainer.runtime.preflight import check_monitors, warn_of_eval_mode
from equipoise.trainer.runtime.releasing import call_all
from equipoise.trainer.runtime.signals import leave_training

if TYPE_CHECKING:
    from equipoise.trainer.loops.evaluation_loop import EvaluationLoop
    from equipoise.trainer.runtime.run_context import RunContext
    from equipoise.trainer.trainer import Trainer

__all__ = ["FitLoop"]


class FitLoop:
    """The training loop; its state outlives a run, so that a second `fit` goes on where the first ended.

    Args:
        trainer: The trainer.
        val_loop: Validates inside the fit.

    Attributes:
        progress: All counters.
        loaders: The training loaders.
        max_batches: Batches per epoch; infinite if unknown.
        val_check_batch: Validate every so many batches; infinite: at the epoch's end; None: by the clock.
        window: The accumulation window.
        skip_backward: Run the forward only (stochastic weight averaging asks for that).
        resumption: Goes on in an epoch that an earlier process began.
        stream: The batches of the epoch; None before its order was drawn.
        loss_watch: Reports a loss that is not finite; None outside of a run.
        epoch_random_state: Every RNG before that.
        workers_before_epoch: How persistent workers had started before that.
        before_validation: What the present or last validation changes, as it was before.
        loaded_at: The epoch in which the loaders were asked for.
        left: What is needed to go on in the epoch that a limit has cut short; None if the last epoch was whole.
        has_ended: Whether `on_train_end` was fired after the last batch.
    """

    def __init__(self, trainer: "Trainer", val_loop: "EvaluationLoop") -> None:
        self.trainer, self.val_loop = trainer, val_loop
        self.progress = trainer.progress
        self.progress.val_batch = val_loop.progress
        self.collection = Collection(training=True)
        self.loaders: Loaders | None = None
        self.max_batches: float = math.inf
        self.val_check_batch: float | None = None
        self.window = AccumulationWindow()
        self.skip_backward = False
        self.resumption: Resumption | None = None
        self.epoch_random_state: dict[str, Any] = {}
        self.workers_before_epoch: list[Any] = []
        self.before_validation: dict[str, Any] = {}
        self.last_validation = 0.0
        self.told_to_wait = False
        self.stream: BatchStream | None = None
        self.loss_watch: LossWatch | None = None
        self.loaded_at: float = -math.inf
        self.left: dict[str, Any] | None = None
        self.has_ended = False

    # One run.

    def run(self, context: "RunContext") -> None:
        """Trains until `max_epochs`, `max_steps`, `max_time` or somebody's `should_stop`."""
        self.context, hooks = context, context.hooks
        self.schedulers = Schedulers(self.trainer, hooks, self.progress.scheduler)
        self.weigh = BatchWeight(context.module, context.strategy.dim, context.strategy.processes.world_size)
        self.load_data()
        if self.loaders is None:
            rank_zero_info("`Trainer.fit` stopped: No training batches.")
            return
        is_finished = self.done() if self.resumption is None else self.resumption.is_finished()
        if is_finished and (self.resumption is None or not self.resumption.lacks_end):
            return
        if not is_finished:
            self._prepare_to_train()
        hooks.call("on_train_start")
        if not is_finished:
            self._train()
        self.has_ended = True  # before the hooks: a resumed run must not fire them again
        hooks.call("on_train_end")

    def _prepare_to_train(self) -> None:
        """Draws the first order and asks for the validation loaders, as Lightning does before `on_train_start`."""
        trainer = self.trainer
        self.has_ended = False
        if trainer.current_epoch == 0 and self.resumption is None:
            self.start_stream()  # before any hook, as in Lightning: making an iterator draws a random number
        self.load_validation_data()
        warn_of_eval_mode(self.context.module)
        self.loss_watch = LossWatch(self.context)

    def load_validation_data(self) -> None:
        """Asks for the validation loaders before the first validation, so that a progress bar knows their length."""
        if self.validates_in_epoch() and self.trainer.val_dataloaders is None:
            self.trainer.validating = True
            self.val_loop.load_data(self.context)
            self.trainer.training = True

    def _train(self) -> None:
        """Trains epoch by epoch; a resumed run first does what was left of its epoch."""
        if self.resumption is not None:
            self.resumption.go_on()
            self.resumption = None
        while not self.done():
            self.begin_epoch()
            with self.context.profile("run_training_epoch"):
                run_epoch(self)
            self.end_epoch()

    def done(self) -> bool:
        """Whether training ends here, between two epochs."""
        trainer, epoch = self.trainer, self.progress.epoch.current
        if 0 <= trainer.max_steps <= trainer.global_step:
            rank_zero_info(f"`Trainer.fit` stopped: `max_steps={trainer.max_steps}` reached.")
            return True
        if trainer.max_epochs is not None and 0 <= trainer.max_epochs <= epoch.processed:
            epoch.completed = epoch.processed
            rank_zero_info(f"`Trainer.fit` stopped: `max_epochs={trainer.max_epochs}` reached.")
            return True
        return bool(trainer.should_stop) and self.can_stop_early()

    def can_stop_early(self) -> bool:
        """Whether `min_epochs` and `min_steps` are met."""
        trainer = self.trainer
        enough_epochs = self.progress.epoch.current.processed >= (trainer.min_epochs or 0)
        return enough_epochs and trainer.global_step >= (trainer.min_steps or 0)

    def release(self) -> None:
        """End worker processes and let go of what belongs to the run."""
        parts = self.loss_watch, self.stream, self.loaders
        self.loss_watch = self.stream = None
        call_all(part.close for part in parts if part is not None)

    # Data.

    def state_dict(self) -> dict[str, Any]:
        """The `fit_loop` entry of a checkpoint: counters, and the states of loaders that have one."""
        state = self.progress.state_dict()
        if loaders := [loader.state_dict() for loader in flat_loaders(self) if has_state(loader)]:
            state["state_dict"] = {"combined_loader": loaders}
        return state

    def forget_data(self) -> None:
        """The loaders will be asked for anew."""
        self.loaders, self.loaded_at = None, -math.inf

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what belongs to one run."""
        of_a_run = ("context", "schedulers", "weigh", "optimization", "loss_watch")
        return {
            **{name: value for name, value in vars(self).items() if name not in of_a_run},
            "loaders": None,
            "stream": None,
            "resumption": None,
            "loss_watch": None,
        }

    def load_data(self) -> None:
        """Asks for the training loaders, at first and every `reload_dataloaders_every_n_epochs`."""
        trainer = self.trainer
        every = trainer.reload_dataloaders_every_n_epochs
        if self.loaders is not None and not (every and trainer.current_epoch - self.loaded_at >= every):
            return
        if trainer.limit_train_batches == 0:
            return
        again = self.loaders is not None or (trainer.current_epoch > 0 and self.resumption is None)
        self.loaded_at = trainer.current_epoch
        self.loaders = self.context.request_loaders(
            "train", trainer.limit_train_batches, overfit=trainer.overfit_batches > 0
        )
        self.max_batches = self.loaders.length()
        self.last_validation = time.monotonic()
        has_length = all(length_of(loader) is not None for loader in self.loaders.flat)
        self.val_check_batch = trainer.run_state.batches_between_validations(self.max_batches, has_length=has_length)
        if again:
            self.loaders.draw_seeds()  # Lightning makes an iterator here, too: shuffles would differ without its draw
        if trainer.loggers and self.max_batches < trainer.log_every_n_steps and not trainer.fast_dev_run:
            rank_zero_warn(
                f"An epoch has {self.max_batches} batches, fewer than log_every_n_steps={trainer.log_every_n_steps}."
                " Set a lower value if you want to see logs of the training epoch."
            )

    def estimated_steps(self, context: "RunContext | None") -> int | float:
        """The number of optimiser steps of the whole training, as far as it can be known; asks for the loaders."""
        trainer = self.trainer
        if trainer.max_epochs == -1:
            return math.inf if trainer.max_steps == -1 else trainer.max_steps
        if context is not None:
            self.context = context
            self.load_data()
        if math.isinf(self.max_batches):
            return trainer.max_steps
        steps: int = math.ceil(self.max_batches / trainer.accumulate_grad_batches) * max(trainer.max_epochs or 0, 1)
        return steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)

    # An epoch.

    def begin_epoch(self) -> None:
        """Fires `on_train_epoch_start` and draws the epoch's order; an epoch that was begun before is only read on."""
        progress, context = self.progress, self.context
        self.left = None
        self.load_data()
        assert self.loaders is not None
        epoch = progress.epoch.current.processed
        self.loaders.set_epoch(epoch)
        context.strategy.set_epoch(epoch)
        if self.resumption is None:
            self.window.reset()  # of an epoch that was left in the midst of it
            progress.epoch.current.ready += 1
            context.hooks.call("on_train_epoch_start")
            progress.epoch.current.started += 1
            progress.begin_epoch()
        if self.stream is None:
            self.start_stream()

    def start_stream(self) -> None:
        """Draw the epoch's order.

        Raises:
            ConfigurationError: If there is no batch, and no number of epochs ends the training.
        """
        assert self.loaders is not None
        self.stream = self.loaders.streams()[0]
        if self._may_weigh():
            self.stream.count_samples(self.weigh.counts)
        if self.resumption is not None:
            self.resumption.start_stream(self.stream)
        else:
            self.epoch_random_state = random_state_of(self.loaders.flat)
            self.workers_before_epoch = self.loaders.workers.state_dict()
            self.stream.start()
        if self.stream.is_empty and self.trainer.max_epochs == -1:
            raise ConfigurationError(
                f"{self.stream.describe_empty()} max_epochs=-1 would repeat empty epochs for ever: give a number."
            )

    def _may_weigh(self) -> bool:
        """Return whether steps of the epoch may be put together from several batches."""
        trainer, strategy = self.trainer, self.context.strategy
        scheduled = any(isinstance(each, GradientAccumulationScheduler) for each in trainer.callbacks)
        return scheduled or trainer.accumulate_grad_batches > 1 or strategy.processes.world_size > 1

    def epoch(self) -> None:
        """Runs the batches of one epoch."""
        context, progress, stream, window = (
            self.context,
            self.progress,
            self.stream,
            self.trainer.accumulate_grad_batches,
        )
        hooks, logs, place, transfer = context.hooks, context.logs, context.strategy.place, context.make_transfer()
        batch_start, batch_end = hooks.bind("on_train_batch_start"), hooks.bind("on_train_batch_end")
        idle_end, before_transfer = hooks.bind_deciders("on_train_batch_end"), hooks.bind("on_before_batch_to_device")
        optimize, schedulers, after_batch = self.bind_optimization(), self.schedulers, AfterBatch(self)
        watch = self.loss_watch.bind() if self.loss_watch is not None else None
        counts, index, wanted = progress.batch.current, progress.batch.current.ready - 1, hooks.uses_outputs()
        scheduled = self.trainer.lr_scheduler_configs  # the list itself: callbacks may add to it
        assert stream is not None
        if self.trainer.should_stop and after_batch.may_stop():  # a hook of the epoch's start asked for it
            return
        run_batch = hooks.profiled(optimize, "run_training_batch")
        for batch in context.batches(stream, "[_TrainingEpochLoop].train_dataloader_next", index + 1):
            index += 1
            counts.ready = index + 1
            progress.batch.is_last_batch = index + 1 == stream.length
            if before_transfer is not None:
                before_transfer(index)
            parts = place(batch, transfer)
            there = len(parts) > 0  # or only other processes have a batch: hardly a hook fires, all else happens
            batch = parts[0] if len(parts) == 1 else batch
            logs.begin_batch(batch)
            if batch_start is not None and there and batch_start(batch, index) == -1:
                self.skip_rest(index)
                break
            counts.started = index + 1
            ends = progress.batch.is_last_batch or index + 1 == self.max_batches
            last = ends or (index + 1) % window == 0
            result = run_batch(parts, index, last)
            counts.processed = index + 1
            if watch is not None and there:
                watch(result, batch, index, last)
            if last and scheduled:
                schedulers.after_batch(index, ends=ends)
            outputs = optimize.outputs(result) if wanted and there else {}
            del result  # its graph goes before others look at what is alive, and before the next batch comes
            if batch_end is not None and there:
                batch_end(outputs, batch, index)
            elif not there:
                logs.forget_steps()
                if idle_end is not None:
                    idle_end({}, None, index)
            del outputs, batch, parts
            logs.end_batch()
            counts.completed = index + 1
            if after_batch(index, last, ends):
                break

    def bind_optimization(self) -> AutomaticOptimization | ManualOptimization:
        """Asked anew each epoch, since callbacks change accumulation and optimisers between epochs."""
        self.window.parts = self.trainer.accumulate_grad_batches
        assert self.loss_watch is not None
        self.optimization = make_optimization(
            self.context,
            self.window,
            self.weigh,
            skip_backward=self.skip_backward,
            count_skipped=self.loss_watch.count_skipped,
        )
        return self.optimization

    def skip_rest(self, index: int) -> None:
        """`on_train_batch_start` returned -1: the epoch ends before this batch."""
        self.progress.batch.is_last_batch = True
        self.progress.batch.current.processed = index + 1
        self.schedulers.after_batch(index, ends=True)

    def batches_done(self) -> bool:
        """Whether the epoch came to its last batch."""
        batch = self.progress.batch
        return batch.is_last_batch or batch.current.ready == self.max_batches

    def end_epoch(self) -> None:
        """Fires `on_train_epoch_end`, and lets schedulers and loggers see the epoch's values."""
        hooks, logs, progress, trainer = self.context.hooks, self.context.logs, self.progress, self.trainer
        if not self.batches_done():
            self.left = leave_epoch(self)
        self.stream = None
        logs.end_batches()
        progress.epoch.current.processed += 1
        # Callbacks that monitor a metric come last, to see what the module logs in its own hook.
        hooks.call_callbacks("on_train_epoch_end", monitoring=False)
        if fire := hooks.bind_module("on_train_epoch_end"):
            fire()
        if progress.epoch.current.processed == 1:
            check_monitors(self.context, has_validated=self.val_loop.has_run)
        hooks.call_callbacks("on_train_epoch_end", monitoring=True)
        self.hand_on_epoch()
        progress.epoch.current.completed = progress.epoch.current.processed
        if trainer.received_sigterm:
            leave_training(self.context)

    def hand_on_epoch(self) -> None:
        """Lets schedulers and loggers see the epoch's values, and forgets them."""
        if self.batches_done():
            self.schedulers.after_epoch()
        self.progress.batches_that_stepped -= 1  # the values stand at the epoch's last step, not at the next epoch's
        self.trainer.log_metrics(self.context.logs.metrics())
        self.progress.batches_that_stepped += 1
        self.context.logs.reset()

    # Validation.

    def validates_in_epoch(self) -> bool:
        """Whether there is validation in this epoch."""
        trainer, every = self.trainer, self.trainer.check_val_every_n_epoch
        return trainer.enable_validation and (every is None or (trainer.current_epoch + 1) % every == 0)

    def validate(self, *, window_ended: bool) -> None:
        """Validates between two batches.

        Args:
            window_ended: Whether nobody needs the gradients any more.
        """
        trainer, context = self.trainer, self.context
        self.before_validation = before_validation(self)
        trainer.validating = True
        if window_ended:
            context.hooks.call_module("on_validation_model_zero_grad")  # leaves the gradients' memory to the validation
        outer = context.logs.enter(self.val_loop.collection)
        self.val_loop.run(context)
        context.logs.leave(outer)
        self.last_validation = time.monotonic()
        trainer.training = True
