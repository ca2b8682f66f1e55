"""One run, from setup to teardown: hooks in Lightning's order, errors, interrupts.

configure_callbacks, prepare_data, setup, configure_model
restore module and callbacks
place the module, configure_optimizers
on_fit_start, hyperparameters to the loggers
restore counters, optimisers, schedulers
the loop
release everything, on_fit_end, teardown
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.interop.lightning.classes import is_a, is_overridden, takes_iterator
from equipoise.interop.lightning.loggers import log_hyperparams
from equipoise.interop.lightning.modules import attach_profiler, forget_run, pretend_device
from equipoise.interop.lightning.self_log import bind_log, unbind_log
from equipoise.memory.devices import empty_cache
from equipoise.notices import rank_zero_warn
from equipoise.parallel.activation_checkpointing import checkpoint_activations, keep_activations
from equipoise.parallel.batches.splitting import Splitter
from equipoise.parallel.replicas.device_threads import on_device
from equipoise.parallel.snapshot import random_state
from equipoise.trainer.checkpoint import restore_modules_and_callbacks, restore_training_state
from equipoise.trainer.checkpointing.choice import select_checkpoint
from equipoise.trainer.checkpointing.reading import load_checkpoint
from equipoise.trainer.data.dataloader_iter import checking_batches
from equipoise.trainer.data.loaders import Source
from equipoise.trainer.diagnostics.error_notes import add_note_on_loading
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.logging.cross_process import LogReduction
from equipoise.trainer.logging.csv_rows import continue_files, keep_rows
from equipoise.trainer.optimization.optimizers import move_state, parse_optimizers
from equipoise.trainer.process_results import ProcessResults, apply_results, collect, shared_objects, this_process
from equipoise.trainer.runtime import slurm
from equipoise.trainer.runtime.preflight import check_run, placing
from equipoise.trainer.runtime.releasing import call_all
from equipoise.trainer.runtime.run_context import RunContext
from equipoise.trainer.runtime.signals import signals_noted, uninterrupted
from equipoise.trainer.settings.callbacks import merge_callbacks
from equipoise.trainer.settings.refused_callbacks import refuse_tuner

if TYPE_CHECKING:
    from equipoise.trainer.trainer import Trainer

__all__ = ["Request", "make_context", "run"]


@dataclass
class Request:
    """What `fit` or one of its siblings was asked.

    Attributes:
        fn: Which of them.
        module: The user's module.
        module_given: Whether it was passed, or is that of the last run.
        datamodule: The user's data module, if there is one.
        loaders: Loaders that were passed, by stage.
        ckpt_path: A path, "best", "last" or None.
        weights_only: False: objects in the checkpoint are created, with whatever code it names.
    """

    fn: TrainerFn
    module: LightningModule
    module_given: bool = True
    datamodule: LightningDataModule | None = None
    loaders: dict[str, Any] = field(default_factory=dict)
    ckpt_path: Any = None
    weights_only: bool | None = None


def run(trainer: "Trainer", request: Request) -> Any:
    """Carries out a request in every process; on any error everything is released, and the error goes on."""
    refuse_tuner(trainer)
    trainer.state.fn, trainer.state.status = request.fn, TrainerStatus.RUNNING
    trainer.state.stage = _STAGE[request.fn]
    trainer.should_stop = False
    slurm.count_fit(trainer.run_state)
    strategy = trainer.connected_strategy
    known = shared_objects(trainer, request) if strategy.processes.spawns else []
    try:
        effects = strategy.processes.launch(partial(_carry_out, trainer, request, known), known)
    except BaseException:
        if trainer.state.stage is not None:  # it was not released yet: it ran in other processes, or nowhere
            trainer.state.status, trainer.state.stage = TrainerStatus.INTERRUPTED, None
            for logger in trainer.loggers:
                logger.finalize("failed")
        raise
    if effects.process != this_process():
        trainer.begin_run(make_context(trainer, request))
    return apply_results(trainer, known, effects)


def _carry_out(trainer: "Trainer", request: Request, known: list[Any]) -> ProcessResults:
    """What every process does; on any error it lets go of everything.

    Where the user's code runs the current device is that of its data, until the run has ended.
    """
    with on_device(trainer.connected_strategy.root_device):
        try:
            result = _run(trainer, request)
            if trainer.connected_strategy.processes.spawns:
                return collect(trainer, known, result)
            return ProcessResults(result)
        except BaseException as error:
            add_note_on_loading(error)
            with uninterrupted():
                _release_after(trainer, request, error)
            raise


_STAGE = {
    TrainerFn.FITTING: RunningStage.TRAINING,
    TrainerFn.VALIDATING: RunningStage.VALIDATING,
    TrainerFn.TESTING: RunningStage.TESTING,
    TrainerFn.PREDICTING: RunningStage.PREDICTING,
}


def _run(trainer: "Trainer", request: Request) -> Any:
    context = _prepare(trainer, request)
    path = slurm.interrupted_checkpoint(trainer.run_state) or select_checkpoint(
        trainer, request.ckpt_path, module_given=request.module_given
    )
    trainer.loaded_ckpt_path = path
    checkpoint: dict[str, Any] | None = None
    if path is not None:
        fitting = request.fn == TrainerFn.FITTING
        checkpoint = load_checkpoint(path, trainer.checkpoint_io, weights_only=request.weights_only, fitting=fitting)
        if fitting and trainer.is_global_zero:
            continue_files(trainer.loggers, checkpoint)
    _set_up(context)
    if checkpoint is not None:
        context.precision.convert_module(context.module)  # before loading: float64 must not pass through float32
        restore_modules_and_callbacks(context, checkpoint)
    context.logs.reset_metrics()
    if trainer.activation_checkpointing and request.fn == TrainerFn.FITTING:
        checkpoint_activations(context.module, trainer.activation_checkpointing)
    with placing(context.module):
        context.strategy.setup(context.module, context.precision)
    if context.trainer.sync_batchnorm:
        context.strategy.share_batch_statistics(context.module)
    if request.fn == TrainerFn.FITTING:
        answer = context.hooks.call_module("configure_optimizers")
        trainer.optimizers, trainer.lr_scheduler_configs = parse_optimizers(answer, context.module)
        context.hooks.call("on_fit_start")
    if trainer.enable_autolog_hparams:
        log_hyperparams(trainer)
    if checkpoint is not None:
        restore_training_state(context, checkpoint)
        rank_zero_info(
            f"{'Restored all states' if request.fn == TrainerFn.FITTING else 'Loaded model weights'} from the"
            f" checkpoint at {path}"
        )
    checkpoint = None  # its memory is not needed during the run
    context.strategy.processes.barrier("resume_end")
    with signals_noted(context):
        results = _run_stage(context)
    slurm.forget_checkpoint(trainer.run_state, is_main=trainer.is_global_zero)
    _tear_down(context)
    return results


# Before the loop.


def _prepare(trainer: "Trainer", request: Request) -> RunContext:
    """Connects module, data and callbacks to the trainer, and checks that they fit."""
    module, datamodule = request.module, request.datamodule
    module.trainer = trainer  # type: ignore[assignment]
    trainer.datamodule = datamodule
    if datamodule is not None:
        datamodule.trainer = trainer  # type: ignore[assignment]
    if request.fn == TrainerFn.FITTING:
        _set_epoch_limits(trainer)
    trainer.callbacks = merge_callbacks(trainer.callbacks, _ask_callbacks(module))
    strategy = trainer.connected_strategy
    size_of: Callable[[Any], int | None] = Splitter(module, strategy.dim).size
    if takes_iterator(module, "training_step"):
        size_of = checking_batches(size_of)
    reduction = None
    processes = strategy.processes
    if processes.world_size > 1:
        reduction = LogReduction(processes.reduce, processes.gather_objects, module, strategy.root_device)
    trainer.logs.connect_run(size_of, reduction)
    context = make_context(trainer, request)
    trainer.begin_run(context)
    check_run(context)
    if not trainer.barebones:
        bind_log(module, trainer.callbacks)
    return context


def make_context(trainer: "Trainer", request: Request) -> RunContext:
    """Return what the loops of a run share."""
    module, datamodule = request.module, request.datamodule
    owner = module if datamodule is None else datamodule
    sources = {stage: Source(stage, request.loaders.get(stage), owner) for stage in ("train", "val", "test", "predict")}
    strategy, precision = trainer.connected_strategy, trainer.precision_in_use
    hooks = Hooks(
        trainer=trainer,
        state=trainer.run_state,
        module=module,
        datamodule=datamodule,
        strategy_name=type(strategy).__name__,
    )
    return RunContext(
        trainer=trainer,
        state=trainer.run_state,
        module=module,
        datamodule=datamodule,
        strategy=strategy,
        precision=precision,
        hooks=hooks,
        logs=trainer.logs,
        logger_output=trainer.logger_output,
        lightning_optimizers=trainer.wrapped_optimizers.current,
        save_checkpoint=trainer.save_checkpoint,
        sources=sources,
    )


def _ask_callbacks(module: LightningModule) -> list[Callback]:
    answer: Any = module.configure_callbacks()
    return [answer] if is_a(answer, Callback) else list(answer or ())


def _set_epoch_limits(trainer: "Trainer") -> None:
    """The defaults of `max_epochs` and `min_epochs`, which depend on other limits."""
    if trainer.max_epochs is None:
        limited = trainer.max_steps != -1 or any(is_a(callback, Timer) for callback in trainer.callbacks)
        if not limited:
            rank_zero_warn(
                "`max_epochs` was not set: training ends after 1000 epochs. For training without limit, set"
                " max_epochs=-1."
            )
        trainer.max_epochs = -1 if limited else 1000
    if trainer.min_epochs is None:
        trainer.min_epochs = 0 if trainer.min_steps is None else 1


def _set_up(context: RunContext) -> None:
    """Everything that the user does before the module is placed."""
    trainer, module, hooks, strategy = context.trainer, context.module, context.hooks, context.strategy
    fn = cast(TrainerFn, trainer.state.fn)
    attach_profiler(trainer.profiler, module)
    trainer.profiler.setup(
        stage=fn,
        local_rank=strategy.processes.local_rank if strategy.processes.world_size > 1 else None,
        log_dir=trainer.log_dir,
    )
    _prepare_data(context)
    pretend_device(module, strategy.root_device)
    # Weights & Biases wants to be first; all loggers begin here, so that callbacks find their folders.
    for logger in sorted(trainer.loggers, key=lambda logger: not is_a(logger, WandbLogger)):
        getattr(logger, "experiment", None)
    keep_rows(trainer.loggers)
    strategy.processes.barrier("pre_setup")
    hooks.call_datamodule("setup", stage=fn)
    hooks.call_callbacks("setup", stage=fn)
    hooks.call_module("setup", stage=fn)
    strategy.processes.barrier("post_setup")
    for legacy in ("configure_sharded_model", "configure_model"):
        if is_overridden(legacy, module):
            with strategy.root_device, context.precision.init_context():
                hooks.call_module(legacy)


def _prepare_data(context: RunContext) -> None:
    """`prepare_data`, in one process of each machine, or in one alone where the owner says so."""
    strategy = context.strategy
    for owner, call in (
        (context.datamodule, context.hooks.call_datamodule),
        (context.module, context.hooks.call_module),
    ):
        if owner is None or not is_overridden("prepare_data", owner):
            continue
        if strategy.processes.local_rank == 0 and (owner.prepare_data_per_node or strategy.processes.node_rank == 0):
            call("prepare_data")
        strategy.processes.barrier("prepare_data")


# The loop.


def _run_stage(context: RunContext) -> Any:
    trainer = context.trainer
    context.strategy.processes.barrier("run-stage")
    context.module.zero_grad()
    torch.set_grad_enabled(True)
    if trainer.state.fn == TrainerFn.FITTING:
        with random_state.isolated():
            _check_sanity(context)
        with torch.autograd.set_detect_anomaly(trainer.detect_anomaly):
            context.logs.enter(trainer.fit_loop_state.fit.collection)
            trainer.fit_loop_state.run(context)
        return None
    if trainer.state.fn == TrainerFn.PREDICTING:
        context.logs.enter(None)
        return trainer.predict_loop.run(context)
    loop = trainer.evaluations[trainer.state.fn.value]  # type: ignore[union-attr]
    context.logs.enter(loop.collection)
    return loop.run(context)


def _check_sanity(context: RunContext) -> None:
    """Runs a few validation batches, so that a mistake there does not show after hours."""
    trainer, loop = context.trainer, context.trainer.fit_loop_state.val_loop
    resumption = trainer.fit_loop_state.resumption
    going_on = resumption is not None and (resumption.in_epoch or trainer.max_steps != -1)
    if not trainer.enable_validation or trainer.num_sanity_val_steps == 0 or going_on:
        return
    trainer.sanity_checking = True
    context.logs.enter(loop.collection)
    context.logs.reset()
    context.logs.reset_metrics()
    context.hooks.call_callbacks("on_sanity_check_start")
    loop.run(context)
    context.hooks.call_callbacks("on_sanity_check_end")
    context.logs.reset()
    context.logs.reset_metrics()
    loop.progress.begin()
    loop.progress.forget_total()
    trainer.training = True


# After the loop.


def _tear_down(context: RunContext) -> None:
    """The good end."""
    trainer, hooks, fn = context.trainer, context.hooks, context.trainer.state.fn
    _release(trainer, context.module, None)
    if fn == TrainerFn.FITTING:
        hooks.call("on_fit_end")
    hooks.call_datamodule("teardown", stage=fn)
    hooks.call_callbacks("teardown", stage=fn)
    hooks.call_module("teardown", stage=fn)
    unbind_log(context.module, trainer.callbacks)
    forget_run(context.module)
    for logger in trainer.loggers:
        logger.finalize("success")
    trainer.profiler.describe()
    trainer.state.status, trainer.state.stage = TrainerStatus.FINISHED, None


def _release_after(trainer: "Trainer", request: Request, error: BaseException) -> None:
    """The bad end: whoever wants to know is told, then everything is released, even if one of them fails."""
    trainer.state.status = TrainerStatus.INTERRUPTED
    trainer.connected_strategy.processes.mark_failed()
    module = request.module
    if isinstance(error, KeyboardInterrupt):
        rank_zero_info("Interrupted by the keyboard: shutting down.")
    try:
        for callback in trainer.callbacks:
            callback.on_exception(trainer, module, error)  # type: ignore[arg-type]
        if request.datamodule is not None:
            request.datamodule.on_exception(error)
        for logger in trainer.loggers:
            logger.finalize("failed")
    finally:
        unbind_log(module, trainer.callbacks)
        forget_run(module)
        try:
            _release(trainer, module, error)
        except Exception as another:  # the first cause is what a user must see
            error.add_note(f"Releasing failed as well: {type(another).__name__}: {another}")
        trainer.state.stage = None


def _release(trainer: "Trainer", module: LightningModule, error: BaseException | None) -> None:
    """Lets go of workers, devices and whatever else a run holds, even if one of them fails."""
    strategy = trainer.connected_strategy
    steps: list[Callable[[], object]] = [trainer.fit_loop_state.release, trainer.predict_loop.release]
    steps += [loop.release for loop in (trainer.fit_loop_state.val_loop, *trainer.evaluations.values())]
    steps.append(partial(trainer.logs.close, failed=error is not None))
    if trainer.checkpoint_io is not None:
        steps.append(trainer.checkpoint_io.teardown)  # one that writes in the background comes to its end
    steps.append(partial(strategy.teardown, error))
    if trainer.activation_checkpointing:
        steps.append(partial(keep_activations, module))
    steps.append(partial(_move_states_to_cpu, trainer))
    steps.append(partial(empty_cache, strategy.devices))  # for others; what a run needs again it takes again
    call_all(steps)


def _move_states_to_cpu(trainer: "Trainer") -> None:
    for optimizer in trainer.optimizers:
        move_state(optimizer, torch.device("cpu"))
