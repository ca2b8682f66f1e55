"""One run, from setup to teardown: hooks in Lightning's order, and the release after an error or Ctrl-C.

configure_callbacks, prepare_data, setup, configure_model
restore module and callbacks
place the module, configure_optimizers
on_fit_start, hyperparameters to the loggers
restore counters, optimisers, schedulers
the loop
release everything, on_fit_end, teardown
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.errors import CheckpointError, ConfigurationError, WorkerError
from equipoise.interop.lightning.loggers import has_csv, log_hyperparams
from equipoise.interop.lightning.modules import as_configured, forget_run
from equipoise.interop.lightning.self_log import unbind_log
from equipoise.interop.versions import warn_of_untested_versions
from equipoise.parallel.communication.processes import Processes
from equipoise.parallel.communication.rank import slurm_job
from equipoise.parallel.device_work import empty_cache, on_device
from equipoise.parallel.snapshot import random_state
from equipoise.strategies.distributed.run_steps import RunSteps
from equipoise.strategies.single_device import SingleDeviceStrategy
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.checkpointing.choice import select_checkpoint
from equipoise.trainer.checkpointing.file import OUR_KEY
from equipoise.trainer.checkpointing.module.hyperparameters import UnplacedHyperparameters, hyperparameters_of
from equipoise.trainer.diagnostics.run_notes import add_run_notes
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.optimization.configuration.optimizers import move_state, parse_optimizers
from equipoise.trainer.optimization.steps.step_extension import step_extensions
from equipoise.trainer.preparation import begin_run, prepare, set_up
from equipoise.trainer.runtime.continuing import newest_saved, note_interrupt
from equipoise.trainer.runtime.preflight import placing, refuse_lost_reports
from equipoise.trainer.runtime.request import Request
from equipoise.trainer.runtime.run_data import RunData
from equipoise.trainer.runtime.signals import signals_noted, uninterrupted
from equipoise.trainer.settings.callbacks import refuse_finders
from equipoise.trainer.surface.parts import TrainerParts

__all__ = ["run"]


def run(parts: TrainerParts, request: Request) -> Any:
    """Carry out a request in every process; on any error everything is released, and the error is raised again.

    Returns:
        What the loop of the entry point returned.
    """
    # 1. The state of the run.
    if parts.is_computing:
        raise ConfigurationError(
            f"`{request.fn.value}` was called within a run of the same trainer. Call it afterwards, or take another"
            " Trainer and a `copy.deepcopy` of the module."
        )
    warn_of_untested_versions()
    state = parts.state
    refuse_finders(state)
    # A subclass of the Trainer may override the property.
    state.root_dir = parts.trainer.default_root_dir
    state.begin(request.fn)
    if slurm_job() is not None:
        from equipoise.trainer.runtime.slurm import count_fit

        count_fit(state)

    # 2. The run, in this process or in those that the strategy starts.
    if parts.strategy.processes.spawns:
        return _run_in_processes(parts, request)
    return _launch(parts, request, partial(_carry_out, parts, request))


def _run_in_processes(parts: TrainerParts, request: Request) -> Any:
    """Carry out a request in processes that the strategy starts, and apply the results to the objects of this one."""
    # A run in one process has no use for this module.
    from equipoise.trainer.process_results import apply_results, collect, shared_objects, this_process

    # 1. The checks of what must be in this process; an error of a worker comes with its traceback.
    state = parts.state
    refuse_lost_reports(state.callbacks)
    if request.fitting:
        for extension in step_extensions(state):
            extension.check_strategy(parts.strategy, state)

    # 2. The run and its results.
    shared = shared_objects(parts, request)
    collect_results = partial(collect, parts, shared)
    carry_out = partial(_carry_out, parts, request, collect_results)
    results = _launch(parts, request, carry_out, shared)
    if results.process != this_process():
        begin_run(parts, request)
    return apply_results(parts, shared, results)


def _launch(parts: TrainerParts, request: Request, function: Callable[[], Any], known: Sequence[Any] = ()) -> Any:
    try:
        return parts.strategy.processes.launch(function, known)
    except BaseException:
        _note_failed_launch(parts, request)
        raise


def _note_failed_launch(parts: TrainerParts, request: Request) -> None:
    """Note an error of a run that released nothing in this process: it ran in other ones, or nowhere."""
    state = parts.state
    if state.status.stage is None:
        return
    # The program may ask for the module, or save it, as after a run in this process.
    begin_run(parts, request)
    state.interrupt()
    state.leave()
    for logger in state.loggers:
        logger.finalize("failed")


def _carry_out(parts: TrainerParts, request: Request, collect: Callable[[Any], Any] | None = None) -> Any:
    """Carry out a request in one process; on any error everything is released.

    Until the run has ended, the current device is that of its data, also in the user's code.

    Args:
        parts: The objects of the trainer.
        request: The arguments of the entry point.
        collect: Turns what the loop has returned into what the process returns. Default: None, it is the same.
    """
    run = _Run(parts, request)
    with on_device(parts.strategy.root_device):
        try:
            result = run.carry_out()
            return result if collect is None else collect(result)
        except BaseException as error:
            with uninterrupted():
                parts.is_computing = False
                try:
                    add_run_notes(error)
                finally:
                    run.release_after(error)
            raise


class _Run:
    """A run in this process. Its methods are its stages, and hand to each room what that room uses."""

    # Made by the first stage.
    hooks: Hooks
    data: RunData

    def __init__(self, parts: TrainerParts, request: Request) -> None:
        self.parts = parts
        self.request = request
        self.state = parts.state
        self.module = request.module
        self.strategy = parts.strategy
        self.precision = parts.precision
        self.logs = parts.logs
        self.fit_loop = parts.fit_loop

    def carry_out(self) -> Any:
        """Carry out all stages, and return what the loop has returned."""
        self.parts.is_computing = True
        state = self.state
        request = self.request

        # 1. Connect module, data and callbacks, and read the checkpoint.
        self.hooks, self.data = prepare(self.parts, request)
        path: Any = None
        if slurm_job() is not None:
            from equipoise.trainer.runtime.slurm import interrupted_checkpoint

            path = interrupted_checkpoint(state)
        if path is None:
            trainer = self.parts.trainer
            path = select_checkpoint(state, trainer, request.ckpt_path, module_given=request.module_given)
        state.loaded_ckpt_path = path
        checkpoint: dict[str, Any] | None = None
        if path is not None:
            checkpoint = self._read_checkpoint(path)
            # Before the user's code asks how many steps there are.
            if request.fitting:
                self.fit_loop.fit.data.steps = RunSteps.from_checkpoint(checkpoint.get(OUR_KEY, {}))

        # 2. The user's setup, and the module's weights.
        # A subclass of the Trainer may override the property.
        log_dir = self.parts.trainer.log_dir
        set_up(state, self.module, self.strategy, self.hooks, self.precision, log_dir)
        if checkpoint is not None:
            from equipoise.trainer.restoration import restore_modules_and_callbacks

            # The precision comes first, since float64 must not pass through float32.
            self.precision.convert_module(self.module)
            restore_modules_and_callbacks(state, self.module, self.strategy, self.hooks, checkpoint)
            if not request.fitting:
                output = self.parts.logger_output
                output.evaluate_checkpoint(checkpoint.get("epoch", 0), checkpoint.get("global_step", 0))
        self.logs.reset_metrics()

        # 3. The module on its devices, and its optimisers.
        self._place()
        if self.strategy.portable.is_sharded:
            self._continue_in_shards(checkpoint)
        if request.fitting:
            self._configure_optimizers()
            self.fit_loop.hook_state.begin_hooks()
            self.hooks.call("on_fit_start")
        if state.enable_autolog_hparams:
            log_hyperparams(self.parts.trainer)

        # 4. The rest of the checkpoint, whose memory the run does not need.
        if checkpoint is not None:
            from equipoise.trainer.restoration import restore_training_state

            restored = restore_training_state(self.parts, self.module, checkpoint, path)
            rank_zero_info(f"{restored} from the checkpoint at {path}")
        checkpoint = None
        self.strategy.processes.barrier("resume_end")

        # 5. The loop.
        with signals_noted(state, self.strategy.processes):
            results = self._run_stage()
        _unite_random_numbers(self.strategy.processes)
        if slurm_job() is not None and self.strategy.processes.is_main:
            from equipoise.trainer.runtime.slurm import forget_checkpoint

            forget_checkpoint(state)
        self._tear_down()
        return results

    # Before the loop

    def _read_checkpoint(self, path: Any) -> dict[str, Any]:
        from equipoise.trainer.checkpointing.reading import load_checkpoint

        state = self.state
        fitting = self.request.fitting
        checkpoint = load_checkpoint(
            path,
            state.checkpoint_io,
            weights_only=self.request.weights_only,
            fitting=fitting,
            keep_shards=self.strategy.portable.is_sharded,
        )
        if fitting and self.strategy.processes.is_main and has_csv(state.loggers):
            from equipoise.trainer.logging.csv_rows import continue_files

            continue_files(state.loggers, checkpoint)
        return checkpoint

    def _place(self) -> None:
        state = self.state
        module = self.module
        changes_layers = state.activation_checkpointing or not isinstance(self.strategy, SingleDeviceStrategy)
        if changes_layers and state.fitting:
            self.fit_loop.fit.unplaced = UnplacedHyperparameters(module, hyperparameters_of(module))
        if state.activation_checkpointing and state.fitting:
            from equipoise.parallel.activation_checkpointing import checkpoint_activations

            checkpoint_activations(module, state.activation_checkpointing)
        with placing(module):
            self.strategy.setup(module, self.precision)
        if state.sync_batchnorm:
            self.strategy.share_batch_statistics(module)

    def _continue_in_shards(self, checkpoint: dict[str, Any] | None) -> None:
        """Set up the callbacks that copy weights, and load the checkpoint, both of which waited for the shards."""
        with as_configured(self.module):
            self.hooks.call_callbacks("setup", stage=self.state.status.fn, copying=True)
        if checkpoint is not None:
            from equipoise.trainer.restoration import restore_in_shards

            restore_in_shards(self.state, self.module, self.strategy, self.hooks, checkpoint)

    def _configure_optimizers(self) -> None:
        state = self.state
        optimizers, configs = parse_optimizers(self.hooks.call_module("configure_optimizers"), self.module)
        if state.fuses_optimizers:
            from equipoise.trainer.optimization.configuration.fused_optimizers import fuse_optimizers

            fuse_optimizers(optimizers, self.module)
        state.optimizers = optimizers
        state.lr_scheduler_configs = configs
        for extension in step_extensions(state):
            extension.check_optimizer(self.fit_loop.training_steps.stepped_optimizer())
        self.strategy.portable.connect_optimizers(optimizers)

    # The loop

    def _run_stage(self) -> Any:
        state = self.state
        self.strategy.processes.barrier("run-stage")
        _separate_random_numbers(self.strategy)
        self.module.zero_grad()
        torch.set_grad_enabled(True)
        if state.fitting:
            with random_state.isolated():
                self._check_sanity()
            with torch.autograd.set_detect_anomaly(state.detect_anomaly):
                self.logs.enter(self.fit_loop.fit.collection)
                self.fit_loop.run()
            return None
        if state.status.fn == TrainerFn.PREDICTING:
            self.logs.enter(None)
            return self.parts.predict_loop.run()
        assert state.status.fn is not None
        loop = self.parts.evaluations[state.status.fn.value]
        self.logs.enter(loop.collection)
        return loop.run()

    def _check_sanity(self) -> None:
        """Run a few validation batches, so that a mistake in them shows before hours of training."""
        # 1. A run that continues has passed the check.
        state = self.state
        logs = self.logs
        resumption = self.fit_loop.resumption
        is_continued = resumption is not None and (resumption.in_epoch or state.max_steps != -1)
        if not self.fit_loop.is_validation_enabled() or state.num_sanity_val_steps == 0 or is_continued:
            return

        # 2. The validation, of which nothing is logged.
        loop = self.fit_loop.val_loop
        state.sanity_checking = True
        logs.enter(loop.collection)
        logs.reset()
        logs.reset_metrics()
        with self.fit_loop.hook_state.sanity_check():
            self.hooks.call_callbacks("on_sanity_check_start")
            loop.run()
            self.hooks.call_callbacks("on_sanity_check_end")
        from equipoise.trainer.diagnostics.monitors import check_monitors_of_validation

        check_monitors_of_validation(state, self.module, self.strategy.processes, logs, loop.collection.names())

        # 3. Values and counters begin anew.
        logs.reset()
        logs.reset_metrics()
        loop.progress.begin()
        loop.progress.forget_total()
        state.training = True

    # After the loop

    def _tear_down(self) -> None:
        state = self.state
        hooks = self.hooks
        fn = state.status.fn
        self.parts.is_computing = False
        self._release(None)
        if state.fitting:
            hooks.call("on_fit_end")
        hooks.call_datamodule("teardown", stage=fn)
        hooks.call_callbacks("teardown", stage=fn)
        hooks.call_module("teardown", stage=fn)
        unbind_log(self.module, state.callbacks)
        forget_run(self.module)
        for logger in state.loggers:
            logger.finalize("success")
        state.profiler.describe()
        state.finish()

    def release_after(self, error: BaseException) -> None:
        """End a run that failed: report the error to callbacks and loggers, then release all, even if one fails."""
        state = self.state
        module = self.module
        state.interrupt()
        self.strategy.processes.mark_failed()
        if isinstance(error, KeyboardInterrupt):
            rank_zero_info("Interrupted by the keyboard: shutting down.")
        try:
            for callback in state.callbacks:
                self._report_to(callback, error)
            if self.request.datamodule is not None:
                self.request.datamodule.on_exception(error)
            for logger in state.loggers:
                logger.finalize("failed")
            if isinstance(error, KeyboardInterrupt) and self.request.fitting:
                note_interrupt(error, newest_saved(state.callbacks), self.fit_loop.global_step)
        finally:
            unbind_log(module, state.callbacks)
            forget_run(module)
            try:
                self._release(error)
            except Exception as another:
                # The user must see the first cause.
                error.add_note(f"Releasing failed as well: {type(another).__name__}: {another}")
            state.leave()

    def _report_to(self, callback: Callback, error: BaseException) -> None:
        """Call a callback's hook for errors. If it cannot write a checkpoint any more, the first error says so."""
        try:
            callback.on_exception(self.parts.trainer, self.module, error)
        except (CheckpointError, WorkerError) as another:
            error.add_note(f"{type(callback).__name__} could not save: {another}")

    def _release(self, error: BaseException | None) -> None:
        """Release workers, devices and whatever else a run holds, even if releasing one of them fails."""
        state = self.state
        # The last one is called first, and all of them even if one fails.
        with ExitStack() as releasing:
            # Other programs may use the memory; a later run allocates again what it needs.
            releasing.callback(empty_cache, self.strategy.devices)
            for optimizer in state.optimizers:
                releasing.callback(move_state, optimizer, torch.device("cpu"))
            if state.activation_checkpointing:
                from equipoise.parallel.activation_checkpointing import keep_activations

                releasing.callback(keep_activations, self.module)
            releasing.callback(self.strategy.teardown, error)
            # A plugin that writes in the background comes to its end.
            if state.checkpoint_io is not None:
                releasing.callback(state.checkpoint_io.teardown)
            releasing.callback(self.logs.close, failed=error is not None)
            for loop in (self.fit_loop.val_loop, *self.parts.evaluations.values()):
                releasing.callback(loop.release)
            releasing.callback(self.parts.predict_loop.release)
            releasing.callback(self.fit_loop.release)


# Random numbers


def _separate_random_numbers(strategy: Strategy) -> None:
    """Let each process, and each device of this process, draw other random numbers for its samples.

    Rank 0 and its first device continue as one process does.
    """
    processes = strategy.processes
    if processes.processes_per_batch > 1:
        # Those that compute one batch together draw the same numbers for it.
        _share_random_numbers(processes)
    rank = processes.data.rank
    if processes.has_one_state:
        _unite_random_numbers(processes)
    elif rank:
        random_state.fork(rank)
    devices = {device: None for device in strategy.devices if device.type == "cuda"}
    for number, device in enumerate(devices):
        if number:
            random_state.fork_device(device, number)


def _unite_random_numbers(processes: Processes) -> None:
    """Let a program that runs in several processes continue with the same random numbers in all of them."""
    if processes.world_size > 1 and not processes.spawns:
        _share_random_numbers(processes)


def _share_random_numbers(processes: Processes) -> None:
    state = processes.broadcast(random_state.capture_host().state_dict())
    random_state.RandomState.from_state_dict(state).restore()
