"""Content of a checkpoint: collected from a run, and restored into one.

The layout is Lightning's, so that either reads the other's; what exact resumption needs beyond it stands under the
key "equipoise".
"""

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import lightning.pytorch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.errors import CheckpointError, ConfigurationError
from equipoise.interop.lightning.callbacks import load_saving_states, saving_states
from equipoise.interop.lightning.modules import hyperparameters_name
from equipoise.interop.lightning.self_log import CURRENT_HOOK
from equipoise.notices import rank_zero_warn
from equipoise.trainer.checkpointing.entry_checks import loading
from equipoise.trainer.checkpointing.layout import check_like, check_optimizer_shapes, check_optimizer_state
from equipoise.trainer.hooks.hooks import overrides, state_key_of
from equipoise.trainer.logging.csv_rows import rows_written
from equipoise.trainer.loops.position import position_of
from equipoise.trainer.state.progress import BatchProgress, Progress

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext
    from equipoise.trainer.trainer import Trainer

__all__ = [
    "OUR_KEY",
    "dump_checkpoint",
    "restore_modules_and_callbacks",
    "restore_training_state",
]

OUR_KEY = "equipoise"


# Writing


def dump_checkpoint(context: "RunContext", *, weights_only: bool = False, path: str | None = None) -> dict[str, Any]:
    """Everything a run needs to go on.

    Args:
        context: The run.
        path: Where it will be written; the callback that asked for it is known by this.
        weights_only: Leave out callbacks, optimisers, schedulers and the state of the precision.
    """
    trainer, hooks, strategy = context.trainer, context.hooks, context.strategy
    checkpoint: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": lightning.pytorch.__version__,
        "state_dict": strategy.portable.module_state(context.module),
        "loops": _loop_states(trainer),
    }
    if not weights_only:
        stateful = [callback for callback in trainer.callbacks if overrides(callback, "state_dict", Callback)]
        states = ((state_key_of(callback), callback.state_dict()) for callback in stateful)
        checkpoint["callbacks"] = {key: state for key, state in states if state}
        checkpoint["optimizer_states"] = [
            strategy.portable.optimizer_state(optimizer) for optimizer in trainer.optimizers
        ]
        checkpoint["lr_schedulers"] = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
        if state := context.precision.state_dict():
            checkpoint[context.precision.checkpoint_key] = state
        if trainer.state.fn == TrainerFn.FITTING:
            loop = trainer.fit_loop_state
            position = position_of(context, loop.fit, loop.val_loop)
            ours: dict[str, Any] = {"version": 1, "position": position, "strategy": strategy.state_dict()}
            if loop.fit.left is not None:
                ours["left"] = loop.fit.left
            writer = _writer(trainer, path)
            ours["checkpoint_callbacks"] = saving_states(trainer.callbacks, writer, path, trainer.global_step)
            hook = vars(context.module)[CURRENT_HOOK]
            ours["written_in"] = [hook, writer.state_key] if writer is not None else None
            ours["rows"] = rows_written(trainer.loggers) if trainer.is_global_zero else []
            if strategy.processes.world_size > 1:
                ours["positions"] = strategy.processes.gather_objects(position)  # each process goes on from its own
            checkpoint[OUR_KEY] = ours
    _dump_hyperparameters(context, checkpoint)
    if context.datamodule is not None and (state := hooks.call_datamodule("state_dict")):
        checkpoint[type(context.datamodule).__qualname__] = state
    if not weights_only:
        hooks.call_callbacks("on_save_checkpoint", checkpoint)
    hooks.call_module("on_save_checkpoint", checkpoint)
    return checkpoint


def _writer(trainer: "Trainer", path: str | None) -> ModelCheckpoint | None:
    """The callback that writes a file; it notes the path in its state before."""
    for callback in trainer.callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        if path in (callback.best_model_path, callback.last_model_path, *callback.best_k_models):
            return callback
    return None


def _loop_states(trainer: "Trainer") -> dict[str, Any]:
    evaluations = trainer.evaluations
    return {
        "fit_loop": trainer.fit_loop_state.fit.state_dict(),
        "validate_loop": {"state_dict": {}, "batch_progress": evaluations["validate"].progress.state_dict()},
        "test_loop": {"state_dict": {}, "batch_progress": evaluations["test"].progress.state_dict()},
        "predict_loop": {"state_dict": {}, "batch_progress": Progress.state_dict(trainer.predict_loop.progress)},
    }


def _dump_hyperparameters(context: "RunContext", checkpoint: dict[str, Any]) -> None:
    """Add the hyperparameters as they are, under the keys by which `load_from_checkpoint` finds them."""
    for owner in (context.module, context.datamodule):
        if owner is None or not owner.hparams:
            continue
        checkpoint[owner.CHECKPOINT_HYPER_PARAMS_NAME] = hyperparameters_name(owner)
        if isinstance(owner.hparams, dict):
            checkpoint[owner.CHECKPOINT_HYPER_PARAMS_KEY] = dict(owner.hparams)
        else:  # one of OmegaConf's containers
            checkpoint[owner.CHECKPOINT_HYPER_PARAMS_KEY] = owner.hparams
            checkpoint[owner.CHECKPOINT_HYPER_PARAMS_TYPE] = type(owner.hparams)


# Reading


def restore_modules_and_callbacks(context: "RunContext", checkpoint: dict[str, Any]) -> None:
    """Loads module, data module and callbacks, before the module is placed."""
    hooks, module, datamodule = context.hooks, context.module, context.datamodule
    hooks.call_module("on_load_checkpoint", checkpoint)
    if module.strict_loading:
        check_fits(module, checkpoint["state_dict"])
    with loading("state_dict"):
        context.strategy.portable.load_module_state(module, checkpoint["state_dict"], strict=module.strict_loading)
    if datamodule is not None and (key := type(datamodule).__qualname__) in checkpoint:
        with loading(key, datamodule):
            hooks.call_datamodule("load_state_dict", checkpoint[key])
    states = checkpoint.get("callbacks")
    if states is None:
        return
    callbacks = context.trainer.callbacks
    if absent := states.keys() - {state_key_of(callback) for callback in callbacks}:
        rank_zero_warn(
            f"The checkpoint holds states of callbacks that are not there now: {sorted(map(str, absent))}. Add them to"
            " go on with them."
        )
    hooks.call_callbacks("on_load_checkpoint", checkpoint)
    for callback in callbacks:
        key = state_key_of(callback)
        if state := states.get(key):
            with loading(f"callbacks[{key!r}]", callback):
                callback.load_state_dict(deepcopy(state))


def check_fits(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Checks that a state belongs to a module.

    Raises:
        CheckpointError: Naming the keys that are missing, unexpected or of another shape.
    """
    own = module.state_dict()
    missing, unexpected = [key for key in own if key not in state], [key for key in state if key not in own]
    shapes = [
        f"{key} {list(state[key].shape)} for {list(value.shape)}"
        for key, value in own.items()
        if key in state
        and isinstance(value, Tensor)
        and isinstance(state[key], Tensor)
        and state[key].shape != value.shape
    ]
    kinds = [
        f"{key} is a {type(state[key]).__name__}"
        for key, value in own.items()
        if key in state and isinstance(value, Tensor) and not isinstance(state[key], Tensor)
    ]
    problems = {
        "missing": missing,
        "unexpected": unexpected,
        "of another shape": shapes,
        "not tensors": kinds,
    }
    if any(problems.values()):
        listed = "; ".join(
            f"{name}: {', '.join(keys[:6])}{' ...' * (len(keys) > 6)}" for name, keys in problems.items() if keys
        )
        raise CheckpointError(
            f"The checkpoint is of another model than {type(module).__name__}: {listed}. Build the model as it was,"
            " or set `strict_loading = False` in it."
        )


def restore_training_state(context: "RunContext", checkpoint: dict[str, Any]) -> None:
    """Loads counters, scaler, optimisers and schedulers, after they were made.

    Raises:
        CheckpointError: If the checkpoint holds weights only.
        ConfigurationError: If it is beyond `max_epochs`.
    """
    trainer = context.trainer
    if (key := context.precision.checkpoint_key) in checkpoint:
        with loading(key):
            check_like(context.precision.state_dict(), checkpoint[key], key)
            context.precision.load_state_dict(checkpoint[key])
    if trainer.state.fn != TrainerFn.FITTING:
        return
    if lacking := [key for key in ("loops", "optimizer_states", "lr_schedulers") if key not in checkpoint]:
        raise CheckpointError(
            f"Training cannot go on from this checkpoint: it lacks {', '.join(lacking)}. Was it saved with"
            " save_weights_only=True? To start anew from"
            " its weights, load them with `load_from_checkpoint` and leave out ckpt_path."
        )
    loop = trainer.fit_loop_state
    try:
        trainer.progress.load_state_dict(checkpoint["loops"]["fit_loop"])
        _restore_evaluations(trainer, checkpoint["loops"])
    except KeyError as error:
        raise CheckpointError(
            f"Training cannot go on from this checkpoint: the counter {error} is missing. Take another one."
        ) from error
    if trainer.max_epochs is not None and 0 <= trainer.max_epochs < trainer.current_epoch:
        raise ConfigurationError(
            f"The checkpoint is at epoch {trainer.current_epoch}, beyond max_epochs={trainer.max_epochs}. Raise"
            " max_epochs to go on."
        )
    ours = checkpoint.get(OUR_KEY, {})
    context.strategy.load_state_dict(ours.get("strategy", {}))
    with loading(OUR_KEY):
        loop.resume(checkpoint["loops"]["fit_loop"], ours)
        load_saving_states(trainer.callbacks, ours.get("checkpoint_callbacks", {}))
    _restore_optimizers(context, checkpoint)


def _restore_evaluations(trainer: "Trainer", loops: dict[str, Any]) -> None:
    for name, progress in (
        ("validate_loop", trainer.evaluations["validate"].progress),
        ("test_loop", trainer.evaluations["test"].progress),
    ):
        if isinstance(progress, BatchProgress) and "batch_progress" in loops.get(name, {}):
            progress.load_state_dict(loops[name]["batch_progress"])


def _check_kind(index: int, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Checks that a state is of the same kind of optimiser: one of another kind has other options.

    Switches are left out, since new ones come with every version of torch.
    """
    options = [name for name, value in getattr(optimizer, "defaults", {}).items() if not isinstance(value, bool | None)]
    for group in state.get("param_groups", ()):
        if lacking := [name for name in options if name not in group]:
            raise CheckpointError(
                f"The state of optimiser {index} in the checkpoint is of another kind than {type(optimizer).__name__}:"
                f" it lacks {', '.join(lacking)}. Let `configure_optimizers` return what it returned then."
            )
        check_like(getattr(optimizer, "defaults", {}), group, f"optimizer_states[{index}]['param_groups']")


def _restore_optimizers(context: "RunContext", checkpoint: dict[str, Any]) -> None:
    trainer, states = context.trainer, checkpoint["optimizer_states"]
    if len(states) != len(trainer.optimizers):
        raise CheckpointError(
            f"The checkpoint holds {len(states)} optimiser state(s), but `configure_optimizers` returned"
            f" {len(trainer.optimizers)}."
        )
    names = {id(parameter): name for name, parameter in context.module.named_parameters()}
    for index, (optimizer, state) in enumerate(zip(trainer.optimizers, states, strict=True)):
        with loading(f"optimizer_states[{index}]", optimizer):
            _check_kind(index, optimizer, state)
            check_optimizer_state(state, f"optimizer_states[{index}]")
            check_optimizer_shapes(optimizer, state, names)
            _load_optimizer(context, index, optimizer, state)
    for index, (config, state) in enumerate(
        zip(trainer.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=False)
    ):
        place = f"lr_schedulers[{index}]"
        with loading(place, config.scheduler):
            check_like(config.scheduler.state_dict(), state, place)
            _check_length(config.scheduler, state)
            config.scheduler.load_state_dict(state)


def _load_optimizer(context: "RunContext", index: int, optimizer: Optimizer, state: dict[str, Any]) -> None:
    try:
        context.strategy.portable.load_optimizer_state(optimizer, state)
    except ValueError as error:
        raise CheckpointError(
            f"The state of optimiser {index} ({type(optimizer).__name__}) in the checkpoint does not fit: {error}."
            " Let `configure_optimizers` return what it returned then."
        ) from error


def _check_length(scheduler: Any, state: dict[str, Any]) -> None:
    """Checks that a scheduler made for a number of steps, as OneCycleLR is, can go on to the end of this run."""
    planned, saved = getattr(scheduler, "total_steps", None), state.get("total_steps")
    if isinstance(planned, int) and isinstance(saved, int) and saved < planned:
        raise ConfigurationError(
            f"The checkpoint's {type(scheduler).__name__} was made for {saved} steps, but this run makes {planned}: its"
            " schedule ends before. Train as long as was planned then, choose a scheduler that has no end, or begin a"
            " new run from the weights, with `load_from_checkpoint` and without ckpt_path."
        )
