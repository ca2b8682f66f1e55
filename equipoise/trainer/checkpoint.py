"""What a checkpoint holds, which one is meant, and how a run takes it back.

The layout is Lightning's, so that either reads the other's; what exact resumption needs beyond it stands under the
key "equipoise".
"""

import os
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import lightning.pytorch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.migration import migrate_checkpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.errors import CheckpointError, ConfigurationError
from equipoise.trainer import interop
from equipoise.trainer.checkpoint_file import plain, read_checkpoint
from equipoise.trainer.hooks import overrides, state_key_of
from equipoise.trainer.progress import BatchProgress, Progress
from equipoise.trainer.resumption import Resumption, position_of

if TYPE_CHECKING:
    from equipoise.trainer.context import Context
    from equipoise.trainer.trainer import Trainer

__all__ = [
    "OUR_KEY",
    "dump_checkpoint",
    "load_checkpoint",
    "restore_modules_and_callbacks",
    "restore_training_state",
    "select_checkpoint",
]

OUR_KEY = "equipoise"


# Writing


def dump_checkpoint(context: "Context", *, weights_only: bool = False) -> dict[str, Any]:
    """Everything a run needs to go on.

    Args:
        context: The run.
        weights_only: Leave out callbacks, optimisers, schedulers and the state of the precision.
    """
    trainer, hooks, strategy = context.trainer, context.hooks, context.strategy
    checkpoint: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": lightning.pytorch.__version__,
        "state_dict": strategy.module_state(context.module),
        "loops": _loop_states(trainer),
    }
    if not weights_only:
        stateful = [callback for callback in trainer.callbacks if overrides(callback, "state_dict", Callback)]
        states = ((state_key_of(callback), callback.state_dict()) for callback in stateful)
        checkpoint["callbacks"] = {key: state for key, state in states if state}
        checkpoint["optimizer_states"] = [strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers]
        checkpoint["lr_schedulers"] = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
        if state := context.precision.state_dict():
            checkpoint[context.precision.checkpoint_key] = state
        if trainer.state.fn == TrainerFn.FITTING:
            position = position_of(trainer.fit_loop_state)
            ours: dict[str, Any] = {"version": 1, "position": position, "strategy": strategy.state_dict()}
            if strategy.world_size > 1:
                ours["positions"] = strategy.gather_objects(position)  # each process goes on from its own
            checkpoint[OUR_KEY] = ours
    _dump_hyperparameters(context, checkpoint)
    if context.datamodule is not None and (state := hooks.call_datamodule("state_dict")):
        checkpoint[type(context.datamodule).__qualname__] = state
    if not weights_only:
        hooks.call_callbacks("on_save_checkpoint", checkpoint)
    hooks.call_module("on_save_checkpoint", checkpoint)
    return checkpoint


def _loop_states(trainer: "Trainer") -> dict[str, Any]:
    evaluations = trainer.evaluations
    return {
        "fit_loop": trainer.fit_loop_state.state_dict(),
        "validate_loop": {"state_dict": {}, "batch_progress": evaluations["validate"].progress.state_dict()},
        "test_loop": {"state_dict": {}, "batch_progress": evaluations["test"].progress.state_dict()},
        "predict_loop": {"state_dict": {}, "batch_progress": Progress.state_dict(trainer.predict_loop.progress)},
    }


def _dump_hyperparameters(context: "Context", checkpoint: dict[str, Any]) -> None:
    """Hyperparameters as plain containers, under the keys by which `load_from_checkpoint` finds them."""
    for owner in (context.module, context.datamodule):
        if owner is None or not owner.hparams:
            continue
        checkpoint[owner.CHECKPOINT_HYPER_PARAMS_NAME] = interop.hyperparameters_name(owner)
        checkpoint[owner.CHECKPOINT_HYPER_PARAMS_KEY] = plain(owner.hparams)
        if not isinstance(owner.hparams, dict) and isinstance(owner, lightning.pytorch.LightningModule):
            # A string stands for "a dictionary whose keys are attributes": a class could not be read back safely.
            checkpoint[owner.CHECKPOINT_HYPER_PARAMS_TYPE] = type(owner.hparams).__name__


# Choosing


def select_checkpoint(trainer: "Trainer", ckpt_path: Any, *, module_given: bool) -> Any:
    """The path that `ckpt_path` stands for; None for none.

    Args:
        trainer: The trainer, whose checkpoint callbacks know the best and the last.
        ckpt_path: A path, "best", "last" or None.
        module_given: Whether a module was passed; without one, the best checkpoint of the last fit is meant.

    Raises:
        ConfigurationError: If there is no such checkpoint.
    """
    word = trainer.state.fn.value if trainer.state.fn is not None else "fit"
    if ckpt_path is not None and not isinstance(ckpt_path, str | os.PathLike):
        raise ConfigurationError(f"ckpt_path must be a path, 'best', 'last' or None, not {ckpt_path!r}.")
    if ckpt_path is not None and not os.fspath(ckpt_path):
        raise ConfigurationError("ckpt_path must be a path, 'best', 'last' or None, not empty.")
    if ckpt_path is None and trainer.managed_ckpt_path is not None:
        return trainer.managed_ckpt_path
    if ckpt_path is None:
        keepers = [callback for callback in trainer.callbacks if isinstance(callback, OnExceptionCheckpoint)]
        if keepers and trainer.state.fn == TrainerFn.FITTING:
            ckpt_path = "last"
        elif module_given:
            return None
        else:
            rank_zero_warn(
                f"`{word}` was called without a module: the best checkpoint of the last fit is used. Say so with"
                " ckpt_path='best'."
            )
            ckpt_path = "best"
    if ckpt_path == "best":
        return _best(trainer, word)
    return _last(trainer, word) if ckpt_path == "last" else ckpt_path


def _best(trainer: "Trainer", word: str) -> str:
    keeper = trainer.checkpoint_callback
    if keeper is None:
        raise ConfigurationError(
            f"`{word}(ckpt_path='best')` needs a ModelCheckpoint among the callbacks, but there is none. Give a path,"
            f" or pass the module, `{word}(module)`, to use the weights that it has."
        )
    if len(trainer.checkpoint_callbacks) > 1:
        rank_zero_warn(
            f"`{word}(ckpt_path='best')`: {len(trainer.checkpoint_callbacks)} callbacks save checkpoints. The best of"
            f" the first is used, which monitors {getattr(keeper, 'monitor', None)!r}. Give a path for another."
        )
    if not (path := getattr(keeper, "best_model_path", "")):
        why = " With fast_dev_run nothing is saved." if trainer.fast_dev_run else ""
        raise ConfigurationError(
            f"`{word}(ckpt_path='best')`: no checkpoint was saved yet.{why} Give a path, or fit first."
        )
    return str(path)


def _last(trainer: "Trainer", word: str) -> str | None:
    """The newest of the files that callbacks call their last; none is no error: one may say "last" at the first fit."""
    from lightning.fabric.utilities.cloud_io import get_filesystem

    found: set[str] = set()
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint):
            found |= interop.last_checkpoints(callback, trainer)
        elif isinstance(callback, OnExceptionCheckpoint):
            found.add(str(callback.ckpt_path))
    existing = {path: get_filesystem(path).modified(path) for path in found if get_filesystem(path).exists(path)}
    if not existing:
        rank_zero_warn(
            f"`{word}(ckpt_path='last')`: there is no last checkpoint yet, so the module's present weights are used."
            " ModelCheckpoint(save_last=True) writes one."
        )
        return None
    return max(existing, key=lambda path: existing[path])


# Reading


def load_checkpoint(path: Any, checkpoint_io: CheckpointIO | None = None) -> dict[str, Any]:
    """Reads a checkpoint and brings one of an older Lightning up to date.

    Args:
        path: Where it is.
        checkpoint_io: The plugin that wrote it; None: it is a file of ours or of Lightning.
    """
    checkpoint: dict[str, Any]
    if checkpoint_io is not None:
        checkpoint = checkpoint_io.load_checkpoint(path, weights_only=True)
    else:
        checkpoint = read_checkpoint(path)
    rank_zero_info(f"Restoring states from the checkpoint path at {path}")
    if "pytorch-lightning_version" in checkpoint:
        checkpoint, _ = migrate_checkpoint(checkpoint)
    return checkpoint


def restore_modules_and_callbacks(context: "Context", checkpoint: dict[str, Any]) -> None:
    """Loads module, data module and callbacks, before the module is placed."""
    hooks, module, datamodule = context.hooks, context.module, context.datamodule
    hooks.call_module("on_load_checkpoint", checkpoint)
    if module.strict_loading:
        check_fits(module, checkpoint["state_dict"])
    context.strategy.load_module_state(module, checkpoint["state_dict"], strict=module.strict_loading)
    if datamodule is not None and (key := type(datamodule).__qualname__) in checkpoint:
        hooks.call_datamodule("load_state_dict", checkpoint[key])
    states = checkpoint.get("callbacks")
    if states is None:
        return
    callbacks = context.trainer.callbacks
    if absent := states.keys() - {state_key_of(callback) for callback in callbacks}:
        rank_zero_warn(
            f"The checkpoint holds states of callbacks that are not there now: {sorted(absent)}. Add them to go on"
            " with them."
        )
    hooks.call_callbacks("on_load_checkpoint", checkpoint)
    for callback in callbacks:
        if state := states.get(state_key_of(callback)):
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
    problems = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
    if any(problems.values()):
        listed = "; ".join(
            f"{name}: {', '.join(keys[:6])}{' ...' * (len(keys) > 6)}" for name, keys in problems.items() if keys
        )
        raise CheckpointError(
            f"The checkpoint is of another model than {type(module).__name__}: {listed}. Build the model as it was,"
            " or set `strict_loading = False` in it."
        )


def restore_training_state(context: "Context", checkpoint: dict[str, Any]) -> None:
    """Loads counters, scaler, optimisers and schedulers, after they were made.

    Raises:
        CheckpointError: If the checkpoint holds weights only.
        ConfigurationError: If it is beyond `max_epochs`.
    """
    trainer = context.trainer
    if (key := context.precision.checkpoint_key) in checkpoint:
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
        loop.progress.load_state_dict(checkpoint["loops"]["fit_loop"])
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
    position, positions = ours.get("position"), ours.get("positions", [])
    if len(positions) == context.strategy.world_size:
        position = positions[context.strategy.global_rank]
    loop.resumption = Resumption(loop, position, checkpoint["loops"]["fit_loop"])
    written_by, processes = len(positions) or 1, context.strategy.world_size
    if position is not None and written_by != processes and loop.resumption.in_epoch and not loop.batches_done():
        raise ConfigurationError(
            f"The checkpoint was written in the middle of an epoch by {written_by} processes, and there are {processes}"
            f" now: some samples of the epoch would be lost, others seen twice. Resume with {written_by}, or from a"
            " checkpoint of an epoch's end."
        )
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


def _restore_optimizers(context: "Context", checkpoint: dict[str, Any]) -> None:
    trainer, states = context.trainer, checkpoint["optimizer_states"]
    if len(states) != len(trainer.optimizers):
        raise CheckpointError(
            f"The checkpoint holds {len(states)} optimiser state(s), but `configure_optimizers` returned"
            f" {len(trainer.optimizers)}."
        )
    for index, (optimizer, state) in enumerate(zip(trainer.optimizers, states, strict=True)):
        _check_kind(index, optimizer, state)
        try:
            context.strategy.load_optimizer_state(optimizer, state)
        except ValueError as error:
            raise CheckpointError(
                f"The state of optimiser {index} ({type(optimizer).__name__}) in the checkpoint does not fit: {error}."
                " Let `configure_optimizers` return what it returned then."
            ) from error
    for config, state in zip(trainer.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=False):
        _check_length(config.scheduler, state)
        config.scheduler.load_state_dict(state)


def _check_length(scheduler: Any, state: dict[str, Any]) -> None:
    """Checks that a scheduler made for a number of steps, as OneCycleLR is, can go on to the end of this run."""
    planned, saved = getattr(scheduler, "total_steps", None), state.get("total_steps")
    if isinstance(planned, int) and isinstance(saved, int) and saved < planned:
        raise ConfigurationError(
            f"The checkpoint's {type(scheduler).__name__} was made for {saved} steps, but this run makes {planned}: its"
            " schedule ends before. Train as long as was planned then, choose a scheduler that has no end, or begin a"
            " new run from the weights, with `load_from_checkpoint` and without ckpt_path."
        )
