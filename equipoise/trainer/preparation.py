"""Steps of a run before its module is placed: module, data, callbacks and loggers are connected, checked and set up."""

from typing import Any, cast

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.trainer.states import TrainerFn

from equipoise.interop.lightning.classes import is_a, is_overridden
from equipoise.interop.lightning.loggers import has_csv
from equipoise.interop.lightning.modules import attach_profiler, pretend_device
from equipoise.interop.lightning.self_log import bind_log
from equipoise.parallel.communication.processes import Processes
from equipoise.precision import Precision
from equipoise.strategies.strategy import Strategy, splitter_of
from equipoise.trainer.data.loaders import Source
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.logging.logs import SizeOf
from equipoise.trainer.runtime.preflight import check_run
from equipoise.trainer.runtime.request import Request
from equipoise.trainer.runtime.run_data import RunData
from equipoise.trainer.settings.callbacks import merge_callbacks
from equipoise.trainer.state.run_state import RunState
from equipoise.trainer.surface.parts import TrainerParts

__all__ = ["begin_run", "prepare", "set_up"]

_STAGES = ("train", "val", "test", "predict")


def prepare(parts: TrainerParts, request: Request) -> tuple[Hooks, RunData]:
    """Connect module, data and callbacks to the trainer, and check that they fit.

    Returns:
        The hooks and the data of the run.
    """
    # 1. Module, data module and callbacks.
    state = parts.state
    module = request.module
    module.trainer = parts.trainer
    state.datamodule = request.datamodule
    if request.datamodule is not None:
        request.datamodule.trainer = parts.trainer
    if request.fitting:
        has_timer = any(is_a(callback, Timer) for callback in state.callbacks)
        state.set_default_epochs(has_timer=has_timer)
    state.callbacks = merge_callbacks(state.callbacks, _callbacks_of(module))

    # 2. Logged values.
    _connect_logs(parts, module)

    # 3. What only this run has, and the checks of the run.
    hooks, data = begin_run(parts, request)
    check_run(state, module, parts.strategy, hooks, parts.precision, data)
    if not state.barebones:
        bind_log(module, state.callbacks)
    return hooks, data


def _callbacks_of(module: LightningModule) -> list[Callback]:
    callbacks: Any = module.configure_callbacks()
    if is_a(callbacks, Callback):
        return [callbacks]
    return list(callbacks or ())


def _connect_logs(parts: TrainerParts, module: LightningModule) -> None:
    """Let the logged values of a run be weighted by batch sizes, and reduced over its processes."""
    strategy = parts.strategy
    size_of: SizeOf = splitter_of(strategy, module).size_of_drawn
    reduction: Any = None
    processes = strategy.processes.data
    if processes.world_size > 1 and processes.has_one_state:
        from equipoise.trainer.logging.agreement import LogAgreement

        reduction = LogAgreement(processes.gather_objects, module)
    elif processes.world_size > 1:
        from equipoise.trainer.logging.cross_process import LogReduction

        reduction = LogReduction(processes.gather_objects, module, strategy.root_device)
    parts.logs.connect_run(size_of, reduction)


def begin_run(parts: TrainerParts, request: Request) -> tuple[Hooks, RunData]:
    """Make the hooks and the data of a run, and hand them to the trainer's loops.

    Returns:
        The hooks and the data.
    """
    module = request.module
    owner = module if request.datamodule is None else request.datamodule
    sources = {stage: Source(stage, request.loaders.get(stage), owner) for stage in _STAGES}
    hooks = Hooks(
        trainer=parts.trainer,
        state=parts.state,
        module=module,
        datamodule=request.datamodule,
        strategy_name=type(parts.strategy).__name__,
        fit=parts.fit_loop if request.fitting else None,
        averaging=lambda: parts.strategy.portable.averaging(),
    )
    data = RunData(parts.state, parts.strategy, hooks, parts.precision, sources)
    parts.begin_run(hooks, data)
    return hooks, data


def set_up(
    state: RunState,
    module: LightningModule,
    strategy: Strategy,
    hooks: Hooks,
    precision: Precision,
    log_dir: str | None,
) -> None:
    """Do everything that the user's code does before the module is placed."""
    fn = cast(TrainerFn, state.status.fn)

    # 1. The profiler.
    attach_profiler(state.profiler, module)
    local_rank = None
    if strategy.processes.world_size > 1:
        local_rank = strategy.processes.local_rank
    state.profiler.setup(stage=fn, local_rank=local_rank, log_dir=log_dir)

    # 2. Data and loggers. All loggers begin here, so that callbacks find their folders.
    _prepare_data(strategy.processes, hooks)
    pretend_device(module, strategy.root_device)
    # Weights & Biases comes first, which observes what the others start.
    for logger in sorted(state.loggers, key=lambda logger: not is_a(logger, WandbLogger)):
        getattr(logger, "experiment", None)
    if has_csv(state.loggers):
        from equipoise.trainer.logging.csv_rows import keep_rows

        keep_rows(state.loggers)

    # 3. The hooks.
    strategy.processes.barrier("pre_setup")
    hooks.call_datamodule("setup", stage=fn)
    if precision.widens and hooks.copies_weights:
        # An average in float32 would round the weights with which it is exchanged.
        precision.convert_module(module)
    # Those that copy weights wait for shards.
    hooks.call_callbacks("setup", stage=fn, copying=False if strategy.portable.is_sharded else None)
    hooks.call_module("setup", stage=fn)
    strategy.processes.barrier("post_setup")

    # 4. Layers that the module creates on the device. A strategy may prepare what the hook reads.
    begin_configuration = getattr(strategy, "begin_configuration", None)
    for name in ("configure_sharded_model", "configure_model"):
        if is_overridden(name, module):
            if begin_configuration is not None:
                begin_configuration(module)
            with strategy.root_device, precision.init_context():
                hooks.call_module(name)
    hooks.call_callbacks("on_configure_model_end")
    end_configuration = getattr(strategy, "end_configuration", None)
    if end_configuration is not None:
        end_configuration(module)


def _prepare_data(processes: Processes, hooks: Hooks) -> None:
    """Call `prepare_data` in one process of each machine, or in one process alone if its owner asks for that."""
    hooks_of_owners = ((hooks.datamodule, hooks.call_datamodule), (hooks.module, hooks.call_module))
    for owner, call_hook in hooks_of_owners:
        if owner is None or not is_overridden("prepare_data", owner):
            continue
        is_chosen = owner.prepare_data_per_node or processes.node_rank == 0
        if processes.local_rank == 0 and is_chosen:
            call_hook("prepare_data")
        processes.barrier("prepare_data")
