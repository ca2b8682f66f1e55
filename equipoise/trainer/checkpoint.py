"""Content of a checkpoint, collected from a run; `restoration.py` restores it into one.

The layout is Lightning's, so that either reads the other's; what exact resumption needs beyond it stands under the
key "equipoise".
"""

import os
from collections.abc import Iterable
from contextlib import nullcontext
from inspect import currentframe
from traceback import walk_stack
from types import FrameType
from typing import Any

import lightning.pytorch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint

from equipoise.errors import CheckpointError
from equipoise.interop.lightning.callbacks import saving_states
from equipoise.interop.lightning.classes import is_a
from equipoise.interop.lightning.loggers import has_csv
from equipoise.interop.lightning.modules import hyperparameters_name
from equipoise.interop.lightning.self_log import CURRENT_HOOK
from equipoise.notices import rank_zero_warn
from equipoise.parallel.communication.processes import in_main
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.checkpointing.file import OUR_KEY, pack_checkpoint, write_checkpoint
from equipoise.trainer.checkpointing.module.hyperparameters import UnplacedHyperparameters
from equipoise.trainer.checkpointing.module.weight_formats import format_of
from equipoise.trainer.checkpointing.objects import warn_of_objects_written
from equipoise.trainer.hooks.hooks import Hooks, overrides, state_key_of
from equipoise.trainer.state.progress import Progress
from equipoise.trainer.state.run_state import RunState
from equipoise.trainer.surface.parts import TrainerParts

__all__ = ["dump_checkpoint", "save_checkpoint"]

# Callbacks that compare a logged value with earlier ones.
_MONITORS = (Checkpoint, EarlyStopping)


def save_checkpoint(
    parts: TrainerParts,
    hooks: Hooks,
    path: str | os.PathLike[str],
    weights_only: bool | None,
    storage_options: Any,
) -> None:
    """Write a checkpoint: a file in the main process, or a folder in all; see `Trainer.save_checkpoint`.

    Args:
        parts: The objects of the trainer.
        hooks: The hooks of the present run, or the last one.
        path: The file or folder.
        weights_only: Leave out everything but the weights and the counters. None: in files of weights.
        storage_options: For the user's CheckpointIO, if there is one.
    """
    state = parts.state
    weight_format = format_of(path, state.checkpoint_io)
    if weight_format is not None and weights_only is False:
        raise CheckpointError(
            f"{os.fspath(path)!r} can hold weights alone: pass weights_only=True, or name it '.ckpt'."
        )
    processes = parts.strategy.processes
    if parts.fit_loop.fit.is_uneven:
        from equipoise.parallel.communication.agreements import agree_to_save

        agree_to_save(processes)
    if parts.fit_loop.replica_check is not None:
        parts.fit_loop.replica_check.compare(parts.global_step)
    folders = None
    if weight_format is None:
        folders = parts.strategy.portable.folders
    leaves_out = weight_format is not None or bool(weights_only)

    def pack() -> bytes:
        _check_placeholders(checkpoint, path)
        warn_of_objects_written(state, checkpoint)
        return pack_checkpoint(checkpoint, path)

    def write() -> None:
        if weight_format is not None:
            weight_format.write(checkpoint["state_dict"], path)
            return
        warn_of_objects_written(state, checkpoint)
        if state.checkpoint_io is not None:
            state.checkpoint_io.save_checkpoint(checkpoint, os.fspath(path), storage_options)
        else:
            write_checkpoint(checkpoint, path)

    with state.profiler.profile("save_checkpoint"):
        # Every process takes part, since each has a share of the state.
        with nullcontext() if folders is None else folders.collecting():
            checkpoint = dump_checkpoint(parts, hooks, weights_only=leaves_out, path=os.fspath(path))
        if folders is None:
            in_main(write, processes)
        else:
            folders.save(path, in_main(pack, processes))


def _check_placeholders(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Check that hooks of the user have not computed with tensors whose values are in shards."""
    from equipoise.parallel.shards.placeholders import place_without_values

    place = place_without_values(checkpoint)
    if place is not None:
        raise CheckpointError(
            f"The checkpoint {os.fspath(path)!r} cannot be written: {place} has no values. In `on_save_checkpoint`"
            " tensors in shards have none, so a hook can move or remove them, but not compute with them. Do so with a"
            " file that `merge_shards` has made, or choose FSDPStrategy(checkpoints='full')."
        )


def dump_checkpoint(
    parts: TrainerParts, hooks: Hooks, *, weights_only: bool = False, path: str | None = None
) -> dict[str, Any]:
    """Return everything that a run needs to continue.

    Args:
        parts: The objects of the trainer.
        hooks: The hooks of the run.
        weights_only: Leave out callbacks, optimisers, schedulers and the state of the precision. Default: False.
        path: The file to which it will be written, by which the callback that writes it is found.
    """
    state = parts.state
    strategy = parts.strategy
    module = hooks.module

    # 1. Counters and weights.
    strategy.portable.prepare()
    checkpoint: dict[str, Any] = {
        "epoch": state.current_epoch,
        "global_step": parts.global_step,
        "pytorch-lightning_version": lightning.pytorch.__version__,
        "state_dict": _weights(state.callbacks, module, strategy),
        "loops": _loop_states(parts),
        **strategy.portable.further_entries(module),
    }

    # 2. The state of the training.
    if state.fitting:
        checkpoint[OUR_KEY] = {"version": 1, "run": parts.fit_loop.fit.run}
    if not weights_only:
        checkpoint["callbacks"] = _callback_states(state.callbacks)
        checkpoint["optimizer_states"] = [
            strategy.portable.optimizer_state(optimizer) for optimizer in state.optimizers
        ]
        checkpoint["lr_schedulers"] = [config.scheduler.state_dict() for config in state.lr_scheduler_configs]
        precision_state = parts.precision.state_dict()
        if precision_state:
            checkpoint[parts.precision.checkpoint_key] = precision_state
        if state.fitting:
            checkpoint[OUR_KEY].update(_exact_position(parts, module, path))

    # 3. Hyperparameters and data module.
    unplaced = parts.fit_loop.fit.unplaced
    for owner in (module, hooks.datamodule):
        if owner is not None and owner.hparams:
            _dump_hyperparameters(owner, strategy, unplaced if owner is module else None, checkpoint)
    if hooks.datamodule is not None:
        datamodule_state = hooks.call_datamodule("state_dict")
        if datamodule_state:
            checkpoint[type(hooks.datamodule).__qualname__] = datamodule_state

    # 4. Additions of the user.
    if not weights_only:
        hooks.call_callbacks("on_save_checkpoint", checkpoint)
    hooks.call_module("on_save_checkpoint", checkpoint)
    return checkpoint


def _weights(callbacks: Iterable[Callback], module: LightningModule, strategy: Strategy) -> dict[str, Any]:
    portable = strategy.portable
    if not any(getattr(callback, "left_out_of_checkpoints", ()) for callback in callbacks):
        return portable.module_state(module)
    from equipoise.trainer.checkpointing.module.left_out import leaving_out, names_left_out

    with leaving_out(module, names_left_out(callbacks)):
        return portable.module_state(module)


def _loop_states(parts: TrainerParts) -> dict[str, Any]:
    validation = parts.evaluations["validate"].progress.state_dict()
    test = parts.evaluations["test"].progress.state_dict()
    # Lightning's entry for predictions does not say whether the last batch was reached.
    prediction = Progress.state_dict(parts.predict_loop.progress)
    return {
        "fit_loop": parts.fit_loop.fit.state_dict(),
        "validate_loop": {"state_dict": {}, "batch_progress": validation},
        "test_loop": {"state_dict": {}, "batch_progress": test},
        "predict_loop": {"state_dict": {}, "batch_progress": prediction},
    }


def _callback_states(callbacks: Iterable[Callback]) -> dict[str, Any]:
    states = {}
    for callback in callbacks:
        if not overrides(callback, "state_dict", Callback):
            continue
        key = state_key_of(callback)
        callback_state = callback.state_dict()
        if callback_state:
            states[key] = callback_state
    return states


def _exact_position(parts: TrainerParts, module: LightningModule, path: str | None) -> dict[str, Any]:
    """Return what exact resumption needs beside Lightning's entries."""
    state = parts.state
    processes = parts.strategy.processes
    fit = parts.fit_loop.fit
    position = parts.fit_loop.position.now()
    entry: dict[str, Any] = {
        "position": position,
        "steps": fit.data.steps.state_dict(),
        "strategy": parts.strategy.portable.strategy_state(),
        "switches": fit.switches.turned_in(module),
    }
    if fit.left is not None:
        entry["left"] = fit.left

    # The callback that writes this file continues after the write.
    hook = vars(module)[CURRENT_HOOK]
    writer = _writer(state, path, hook)
    entry["checkpoint_callbacks"] = saving_states(state.callbacks, writer, path, parts.global_step, hook)
    entry["written_in"] = None
    if writer is not None:
        entry["written_in"] = [hook, state_key_of(writer)]

    # Rows of log files, written by the main process, and the position of each process.
    entry["rows"] = []
    if processes.is_main and has_csv(state.loggers):
        from equipoise.trainer.logging.csv_rows import rows_written

        entry["rows"] = rows_written(state.loggers)
    if processes.data.world_size > 1:
        # Each compares the values of its own process, unless they were synchronised.
        position["monitors"] = _callback_states(callback for callback in state.callbacks if is_a(callback, *_MONITORS))
        entry["positions"] = processes.data.gather_objects(position)
    return entry


def _writer(state: RunState, path: str | None, hook: str | None) -> Callback | None:
    """Return the callback that writes a file: it has noted the path in its state, or its hook is running."""
    for saver in [each for each in state.callbacks if isinstance(each, ModelCheckpoint)]:
        if path in (saver.best_model_path, saver.last_model_path, *saver.best_k_models):
            return saver
    frames = [frame for frame, _ in walk_stack(currentframe())]
    return next((each for each in state.callbacks if any(_runs(frame, each, hook) for frame in frames)), None)


def _runs(frame: FrameType, callback: Callback, hook: str | None) -> bool:
    """Return whether a frame runs the hook of a callback, which may be a function of another name."""
    code = frame.f_code
    method = getattr(callback, str(hook), None)
    is_own = any(frame.f_locals.get(name) is callback for name in ("self", *code.co_varnames[:1]))
    if code is getattr(method, "__code__", None):
        # A function that was assigned to the callback does not receive it.
        return is_own or not hasattr(method, "__self__")
    return is_own and code.co_name == hook


def _dump_hyperparameters(
    owner: Any, strategy: Strategy, unplaced: UnplacedHyperparameters | None, checkpoint: dict[str, Any]
) -> None:
    """Add hyperparameters as they are, under the keys by which `load_from_checkpoint` finds them."""
    checkpoint[owner.CHECKPOINT_HYPER_PARAMS_NAME] = hyperparameters_name(owner)
    if isinstance(owner.hparams, dict):
        hyperparameters = _plain_hyperparameters(dict(owner.hparams), strategy, unplaced, checkpoint)
        checkpoint[owner.CHECKPOINT_HYPER_PARAMS_KEY] = hyperparameters
    else:
        # A container of OmegaConf.
        checkpoint[owner.CHECKPOINT_HYPER_PARAMS_KEY] = owner.hparams
        checkpoint[owner.CHECKPOINT_HYPER_PARAMS_TYPE] = type(owner.hparams)


def _plain_hyperparameters(
    hyperparameters: dict[str, Any],
    strategy: Strategy,
    unplaced: UnplacedHyperparameters | None,
    checkpoint: dict[str, Any],
) -> dict[str, Any]:
    """Return hyperparameters as they were before the module was placed; a folder of shards leaves out networks."""
    if unplaced is None or not unplaced.networks:
        return hyperparameters
    if strategy.portable.folders is None:
        return {**hyperparameters, **unplaced.filled(checkpoint["state_dict"])}
    networks = unplaced.networks
    rank_zero_warn(
        f"The hyperparameters {sorted(networks)} are networks, which a sharded checkpoint leaves out: their weights are"
        " in its shards. Pass them to `load_from_checkpoint`, or choose FSDPStrategy(checkpoints='full')."
    )
    return {name: value for name, value in hyperparameters.items() if name not in networks}
