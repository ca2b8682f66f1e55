"""The training loop: epochs, and what happens between them.

    run
      begin_epoch        the order is drawn, on_train_epoch_start
      epoch              batches: `training_epoch.py`
        validate         between two batches
      end_epoch          on_train_epoch_end, schedulers, loggers

A resumed run first completes the epoch in which its checkpoint was written.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.interop.lightning.classes import is_stock
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.diagnostics.loss_watch import LossWatch
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.logging.logger_output import LoggerOutput
from equipoise.trainer.loops.after_batch import AfterBatch
from equipoise.trainer.loops.fit_state import FitState
from equipoise.trainer.loops.position import PositionOfRun
from equipoise.trainer.loops.stopping import Stopping
from equipoise.trainer.loops.training_epoch import TrainingEpoch
from equipoise.trainer.loops.validation_schedule import ValidationSchedule
from equipoise.trainer.optimization.configuration.schedulers import Schedulers
from equipoise.trainer.optimization.training_steps import TrainingSteps
from equipoise.trainer.runtime.preflight import warn_of_eval_mode
from equipoise.trainer.runtime.run_data import RunData
from equipoise.trainer.runtime.signals import EndOnSignal
from equipoise.trainer.state.hook_state import HookState

if TYPE_CHECKING:
    from equipoise.parallel.divergence.replica_check import ReplicaCheck
    from equipoise.trainer.diagnostics.uncounted_steps import UncountedSteps
    from equipoise.trainer.evaluation.evaluation_loop import EvaluationLoop
    from equipoise.trainer.loops.resumption import Resumption
    from equipoise.trainer.optimization.automatic import AutomaticOptimization
    from equipoise.trainer.optimization.manual import ManualOptimization
    from equipoise.trainer.state.run_state import RunState

__all__ = ["FitLoop"]


class FitLoop:
    """The training loop.

    Attributes:
        has_begun: Whether a run has begun.
        position: Collects the position of the present run for checkpoints, and restores it.
        fit: State that outlives a run, so that a second `fit` continues where the first ended.
        resumption: Continues an epoch that an earlier process began; None if there is none.
        optimization: Takes the steps of the present or last epoch.
        loss_watch: Reports a loss that is not finite; None outside of a run.
        later_files: Checkpoints that are newer than the one that this run resumes from.
        last_writes: The steps at which checkpoint callbacks have written their last files before the validation whose
            value they rank, by their keys.
        uncounted_steps: Warns of steps by hand that are not counted; None if steps are automatic, or outside of a run.
        replica_check: Compares replicas between processes; None if there are none, or outside of a run.
    """

    # The parts of the present run.
    module: LightningModule
    strategy: Strategy
    hooks: Hooks
    data: RunData
    training_steps: TrainingSteps
    stopping: Stopping
    position: PositionOfRun
    hook_state: HookState
    schedulers: Schedulers
    optimization: "AutomaticOptimization | ManualOptimization"

    def __init__(
        self,
        state: "RunState",
        logger_output: LoggerOutput,
        val_loop: "EvaluationLoop",
        is_validation_enabled: Callable[[], bool],
    ) -> None:
        self.state = state
        self.logger_output = logger_output
        self.logs = logger_output.logs
        self.val_loop = val_loop
        self.is_validation_enabled = is_validation_enabled
        self.has_begun = False
        self.fit = FitState(state.progress)
        self.resumption: Resumption | None = None
        self.loss_watch: LossWatch | None = None
        self.uncounted_steps: UncountedSteps | None = None
        self.replica_check: ReplicaCheck | None = None
        self.later_files: set[str] = set()
        self.last_writes: dict[str, int] = {}
        # Removes the hooks that an epoch has registered.
        self._close_epoch_hooks: Callable[[], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what outlives a run, for another process."""
        without_run = FitLoop(self.state, self.logger_output, self.val_loop, self.is_validation_enabled)
        return {**vars(without_run), "fit": self.fit}

    # One run.

    def begin_run(
        self,
        module: LightningModule,
        strategy: Strategy,
        hooks: Hooks,
        data: RunData,
        training_steps: TrainingSteps,
        end: EndOnSignal,
    ) -> None:
        """Take the parts of a run, and forget what belongs to earlier ones."""
        self.has_begun = True
        self.module = module
        self.strategy = strategy
        self.hooks = hooks
        self.data = data
        self.training_steps = training_steps
        self.stopping = Stopping(self.state, module, strategy.processes, self.fit, end)
        self.later_files = set()
        self.last_writes = {}
        self.position = PositionOfRun(self.state, module, strategy, hooks, self.logs, self.fit, self.val_loop)
        self.hook_state = HookState(self.state, strategy, hooks, self.fit.data, self.val_loop)
        self.fit.begin_run(self.hook_state)

    def resume(self, loop_state: dict[str, Any], ours: dict[str, Any]) -> None:
        """Prepare to continue from a checkpoint, once its counters are loaded.

        Args:
            loop_state: The `fit_loop` entry of the checkpoint.
            ours: The entry under our own key; empty for a checkpoint of Lightning.
        """
        from equipoise.trainer.loops.cut_hook import CutHook
        from equipoise.trainer.loops.resumption import Resumption, saved_position

        self.fit.run = ours.get("run", self.fit.run)
        self.fit.switches.turned = ours.get("switches", {})
        saved = saved_position(self.state, self.module, self.strategy.processes, self.fit, loop_state, ours)
        cut_hook = CutHook(self.state, self.module, self.strategy, self.hooks, self.logs, self.fit, saved.written_in)
        self.resumption = Resumption(self.fit, self.val_loop, cut_hook, saved)

    def run(self) -> None:
        """Train until `max_epochs`, `max_steps`, `max_time` or a request to stop."""
        module = self.module
        strategy = self.strategy
        hooks = self.hooks
        # 1. Bind what belongs to this run, and request the loaders.
        self.schedulers = Schedulers(self.state, module, strategy.processes, hooks, self.logs, self._awaits_validation)
        self.training_steps.begin()
        if self.resumption is None:
            self.load_data()
        else:
            self.resumption.request_loaders(self.load_data)
        if self.fit.data.loaders is None:
            rank_zero_info("`Trainer.fit` stopped: No training batches.")
            return
        self.hook_state.begin_data()
        if self.resumption is not None:
            self.resumption.check_steps()
        # 2. A resumed run may have nothing left to train, and yet lack the hook of the end.
        if self.resumption is None:
            is_finished = self.stopping.is_over()
            lacks_end = False
        else:
            is_finished = self._is_resumed_finished(self.resumption)
            lacks_end = self.resumption.lacks_end
        if is_finished and not lacks_end:
            self.hook_state.restore()
            self.stopping.say_why()
            if self.resumption is None:
                self.stopping.warn_of_earlier_fit()
            return
        # 3. Train.
        if not is_finished:
            self._prepare_to_train()
        hooks.call("on_train_start")
        # Hooks of the start may turn them back.
        self.fit.switches.begin(module)
        self.hook_state.begin()
        if self.resumption is not None:
            self.hook_state.bring_back(in_epoch=self.resumption.in_epoch)
        if not is_finished:
            self._train()
            # Scripts under torchrun continue with the module in every process.
            strategy.sync_buffers()
        # Before the hooks: a resumed run must not call them again.
        self.fit.end()
        hooks.call("on_train_end")
        if hooks.copies_weights:
            strategy.sync_buffers()
        # Below the line that a progress bar leaves of the last epoch.
        self.stopping.say_why()

    def _prepare_to_train(self) -> None:
        """Draw the first order and request the validation loaders, as Lightning does before `on_train_start`."""
        self.fit.begin()
        # Before any hook, as in Lightning: opening the loaders draws a random number.
        if self.state.current_epoch == 0 and self.resumption is None:
            self._start_stream()
        self._load_validation_data()
        warn_of_eval_mode(self.module)
        self.loss_watch = LossWatch(self.state, self.module, self.strategy, self.fit.batches_done)
        self.uncounted_steps = None
        if not self.module.automatic_optimization:
            from equipoise.trainer.diagnostics.uncounted_steps import UncountedSteps

            self.uncounted_steps = UncountedSteps(self.state, self.module)
        self._begin_replica_check()

    def _begin_replica_check(self) -> None:
        strategy = self.strategy
        if strategy.processes.world_size == 1:
            return
        from equipoise.parallel.divergence.replica_check import ReplicaCheck
        from equipoise.parallel.divergence.replicated import Replicated

        if strategy.replicated_tensors() == Replicated():
            return
        self.replica_check = ReplicaCheck(strategy.replicated_tensors, strategy.processes, self.global_step)
        self.fit.awaits_step = True

    def _load_validation_data(self) -> None:
        """Request the validation loaders before the first validation, so that a progress bar knows their length."""
        if self.validates_in_epoch and self.val_loop.loaders is None:
            self.state.begin_validation()
            self.val_loop.load_data()
            self.state.end_validation()

    def _train(self) -> None:
        if self.resumption is not None:
            self._complete_epoch(self.resumption)
            self.resumption = None
        while not self.stopping.is_over():
            self._begin_epoch()
            with self.hooks.profile("run_training_epoch"):
                self._run_epoch()
            self._end_epoch()

    def release(self) -> None:
        """End worker processes and release what belongs to the run."""
        # The last one is called first, and all of them even if one fails.
        with ExitStack() as closing:
            if self._close_epoch_hooks is not None:
                closing.callback(self._close_epoch_hooks)
            if self.has_begun:
                closing.callback(self.training_steps.close)
            closing.callback(self.fit.data.close)
            if self.loss_watch is not None:
                closing.callback(self.loss_watch.close)
            self._close_epoch_hooks = None
            self.loss_watch = None
            self.uncounted_steps = None
            self.replica_check = None

    @property
    def global_step(self) -> int:
        """Number of optimiser steps done, over all optimisers; it is not reset."""
        return self.state.progress.global_step(self.module)

    @property
    def validates_in_epoch(self) -> bool:
        """True if the fit validates in the present epoch."""
        return self.is_validation_enabled() and self.state.is_validation_epoch

    # Data.

    def load_data(self) -> None:
        """Request the training loaders, if that is due."""
        state = self.state
        data = self.fit.data
        if not data.is_request_due(state):
            return
        self.hook_state.begin_request()
        is_first = data.loaders is None
        is_repeated = not is_first or (state.current_epoch > 0 and self.resumption is None)
        data.request(state, self.module, self.strategy, self.data.request_loaders)
        self.fit.schedule_validation(state.batches_between_validations(data.max_batches, has_length=data.has_length))
        # Lightning opens the loaders here, too: shuffles would differ without this draw.
        if is_repeated and data.loaders is not None:
            data.loaders.draw_seeds()
        if is_first:
            data.warn_of_rare_logs(state)
            data.report_long_window(state)

    def estimated_steps(self) -> int | float:
        """Return the number of optimiser steps of the whole training, as far as it can be known.

        The loaders of the run are requested; before the first run there are none.
        """
        if self.has_begun and self.state.max_epochs != -1:
            self.load_data()
        return self.fit.data.estimated_steps(self.state)

    def _start_stream(self) -> None:
        """Draw the epoch's order, or continue that of a resumed epoch."""
        data = self.fit.data
        data.make_stream()
        self.training_steps.weight.counts = data.open_stream.counts
        if self.resumption is None:
            self.hook_state.note_order()
            data.draw_order()
        else:
            self.resumption.start_stream()
        data.check_not_empty(self.state.max_epochs)

    # An epoch.

    def _begin_epoch(self) -> None:
        """Call `on_train_epoch_start` and draw the epoch's order. A resumed epoch only continues its stream."""
        progress = self.fit.progress
        data = self.fit.data
        self.fit.left = None
        # 1. The loaders, which learn the number of the epoch.
        self.load_data()
        assert data.loaders is not None
        data.loaders.set_epoch(progress.epoch.current.processed)
        # 2. The hooks.
        if self.resumption is None:
            # An epoch that was left early may have left it open.
            self.fit.window.reset()
            self.fit.has_ended_early = False
            self.fit.has_validated_in_epoch = False
            progress.epoch.current.make_ready()
            self.hooks.call("on_train_epoch_start")
            progress.epoch.current.start()
            progress.begin_epoch()
        self.hook_state.report()
        # 3. The order.
        if data.stream is None:
            self._start_stream()

    def _run_epoch(self) -> None:
        assert self.loss_watch is not None
        self.optimization = self.training_steps.of_epoch(self.fit.window, skip_backward=self.fit.skip_backward)
        self._close_epoch_hooks = self.optimization.close
        epoch = TrainingEpoch(
            self.state,
            self.strategy,
            self.hooks,
            self.logs,
            self.data,
            self.fit,
            schedulers=self.schedulers,
            optimization=self.optimization,
            loss_watch=self.loss_watch,
            after_batch=self._after_batch(),
        )
        # A hook of the epoch's start may have asked training to stop.
        if not self.state.should_stop or not self.stopping.may_stop():
            if self.uncounted_steps is not None:
                self.uncounted_steps.begin_epoch()
            epoch.run()
            if self.uncounted_steps is not None:
                self.uncounted_steps.end_epoch()
        self._close_epoch_hooks()

    def _after_batch(self) -> AfterBatch:
        return AfterBatch(
            self.state,
            self.hooks,
            self.logger_output,
            self.fit,
            self.schedulers,
            self._schedule(),
            validate=self._validate if self.validates_in_epoch else None,
            compare_replicas=self._compare_replicas,
        )

    def _schedule(self) -> ValidationSchedule:
        return ValidationSchedule(self.state, self.strategy, self.fit, self.stopping)

    def _compare_replicas(self) -> None:
        """Compare replicas after the first step, or leave it to the next comparison where the step would wait."""
        assert self.replica_check is not None
        self.replica_check.note(self.global_step)
        # On a GPU the host would wait for the digests.
        if self.strategy.root_device.type == "cpu":
            self.replica_check.compare_noted()

    def _end_epoch(self) -> None:
        """Call `on_train_epoch_end`, and let schedulers and loggers see the epoch's values."""
        hooks = self.hooks
        epoch = self.fit.progress.epoch.current
        # 1. Note where a limit has cut the epoch short.
        if not self.fit.batches_done():
            self.fit.left = self.position.at_left_epoch()
        all_have_trained = self.fit.data.open_stream.even_steps > 0
        self.fit.data.stream = None
        self.logs.end_batches()
        epoch.process()
        # 2. Callbacks that monitor a metric come last, to see what the module logs in its own hook.
        hooks.call_callbacks("on_train_epoch_end", monitoring=False)
        call_module = hooks.bind_module("on_train_epoch_end")
        if call_module is not None:
            call_module()
        self.logs.share_values()
        if epoch.processed == 1 and any(is_stock(callback, EarlyStopping) for callback in self.state.callbacks):
            from equipoise.trainer.diagnostics.monitors import check_monitors

            check_monitors(
                self.state, self.logs, validates=self.is_validation_enabled(), has_validated=self.val_loop.has_run
            )
        hooks.call_callbacks("on_train_epoch_end", monitoring=True)
        # 3. Schedulers and loggers.
        self._hand_on_epoch()
        epoch.complete()
        if self.replica_check is not None:
            self.replica_check.compare(self.global_step, buffers=all_have_trained)
        if self.state.received_sigterm:
            self.stopping.end_on_signal()

    def _hand_on_epoch(self) -> None:
        """Let schedulers and loggers see the epoch's values, and forget them."""
        if self.fit.batches_done():
            self.schedulers.after_epoch()
        log_metrics = self.hooks.wrapped(self.logger_output.log_metrics, "log_metrics")
        # The callbacks above may have logged as well.
        self.logs.share_values()
        with self.fit.progress.at_last_step():
            log_metrics(self.logs.metrics())
        self.logs.reset()

    # Validation, and what callbacks ask.

    def _validate(self, window_ended: bool) -> None:
        """Validate between two batches."""
        from equipoise.trainer.evaluation.shared_metrics import separated_metrics

        if self.replica_check is not None:
            self.replica_check.compare_noted()
        self.fit.has_validated_in_epoch = True
        self.fit.before_validation = self.position.before_validation()
        self.state.begin_validation()
        self.fit.switches.enter_validation(self.module)
        # The memory of the gradients is free during the validation.
        if window_ended:
            self.hooks.call_module("on_validation_model_zero_grad")
        outer = self.logs.enter(self.val_loop.collection)
        earlier_names = self.fit.validated_metrics
        with separated_metrics(self.module, self.fit.collection, self.val_loop.collection, earlier_names):
            self.val_loop.run()
        self.logs.leave(outer)
        self.fit.restart_clock()
        self.fit.switches.leave_validation()
        self.state.end_validation()

    def has_skipped_step(self) -> bool:
        """Return True if the scaler of the loss has skipped the last optimiser step."""
        return self.optimization.has_skipped

    def is_of_this_run(self, path: str) -> bool:
        """Return True if this run wrote a checkpoint, or the run that it resumes from, or one was not completed."""
        from equipoise.trainer.checkpointing.file import completion_time
        from equipoise.trainer.checkpointing.reading import run_of

        return completion_time(path) is None or run_of(path, self.state.checkpoint_io) == self.fit.run

    def is_validated(self, name: str) -> bool:
        """Return True if the validation alone logs a value; the training may log one of the same name."""
        if name in self.fit.collection.names():
            return False
        return name in self.val_loop.collection.names() or name in self.fit.validated

    def validates_next(self) -> bool:
        """Return True if validation follows the present batch; called in all processes together."""
        index = self.fit.progress.batch.current.ready - 1
        return self.validates_in_epoch and self._schedule().is_due(index)

    def _awaits_validation(self, name: str) -> bool:
        """Return True if a value is still to come: validations log it, and the present epoch had none."""
        if self.fit.has_validated_in_epoch or not self.data.can_validate:
            return False
        if name in self.logs.callback_metrics:
            return self.is_validated(name)
        return not self.val_loop.has_run

    # Resumption.

    def _is_resumed_finished(self, resumption: "Resumption") -> bool:
        """Return True if nothing is left to train, once the epoch at whose end the checkpoint was written is closed."""
        resumption.restore_loaders()
        if resumption.at_epoch_end:
            self._close_epoch(resumption)
        return not resumption.is_after_batch and self.stopping.is_over()

    def _close_epoch(self, resumption: "Resumption") -> None:
        """Run the rest of an epoch whose last hook wrote the checkpoint."""
        if resumption.position is not None:
            self.position.load_logs(resumption.position)
            self.logs.end_batches()
            resumption.load_random_state()
            # Checkpoint callbacks read how many batches there are.
            self._load_validation_data()
            resumption.cut_hook.finish_epoch()
            self._hand_on_epoch()
        self.fit.progress.epoch.current.complete()

    def _complete_epoch(self, resumption: "Resumption") -> None:
        """Run the rest of a batch whose hook wrote the checkpoint, and the rest of its epoch."""
        position = resumption.position
        # 1. The values that the epoch has logged.
        if position is not None and not resumption.at_epoch_end:
            self.position.load_logs(position)
            self.logs.in_batches = resumption.in_epoch and self.fit.progress.batch.current.ready > 0
        # 2. The order of the batches.
        if resumption.in_epoch:
            self._begin_epoch()
            if position is not None:
                self.position.load_gradients(position)
        elif position is not None and position["order_drawn"]:
            # That of the first epoch is drawn before on_train_epoch_start.
            self._start_stream()
        # The data may have changed since the order was drawn.
        self.hook_state.restore()
        resumption.load_random_state()
        # 3. The rest of the batch, and the rest of the epoch.
        if resumption.in_epoch:
            if not self._complete_batch(resumption):
                self._run_epoch()
            self._end_epoch()

    def _complete_batch(self, resumption: "Resumption") -> bool:
        """Do what follows the last batch, and return whether the epoch ends with it."""
        batch = self.fit.progress.batch.current
        index = batch.ready - 1
        ends_epoch = self.fit.batches_done()
        ends_window = ends_epoch or (index + 1) % self.state.accumulate_grad_batches == 0
        # 1. The checkpoint was written after the batch.
        if resumption.batch_unfinished:
            resumption.cut_hook.finish_batch(index)
            batch.set(index + 1)
            return self._after_batch()(index, ends_window, ends_epoch)
        if not resumption.in_validation:
            return False
        # 2. It was written in a validation, which ends now or begins anew.
        has_validated = resumption.has_validated()
        if resumption.position is not None:
            if has_validated:
                resumption.cut_hook.finish_validation()
                self.position.load_after_validation(resumption.position)
            else:
                self.position.load_before_validation(resumption.position)
        return self._after_batch()(index, ends_window, ends_epoch, write=False, validate=not has_validated)
