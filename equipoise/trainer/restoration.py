"""Restores the content of a checkpoint into a run: the module before it is placed, then the rest of the training."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.errors import CheckpointError, ConfigurationError
from equipoise.interop.lightning.callbacks import (
    copies_weights,
    files_written_after,
    load_saving_states,
)
from equipoise.interop.lightning.classes import is_a
from equipoise.interop.torch.modules import versions
from equipoise.notices import rank_zero_warn
from equipoise.parallel.communication.processes import Processes
from equipoise.parallel.optimizers.state_dtypes import restore_dtypes
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.checkpointing.entry_checks import loading
from equipoise.trainer.checkpointing.file import OUR_KEY, completion_time
from equipoise.trainer.checkpointing.layout import check_like, check_optimizer_shapes, check_optimizer_state
from equipoise.trainer.checkpointing.module.left_out import completed
from equipoise.trainer.checkpointing.module.names import parts_without_weights, with_present_names
from equipoise.trainer.checkpointing.module.weight_formats import format_of
from equipoise.trainer.hooks.hooks import Hooks, state_key_of
from equipoise.trainer.optimization.configuration.fused_optimizers import with_present_choice
from equipoise.trainer.runtime.best_files import in_present_folder
from equipoise.trainer.state.run_state import RunState
from equipoise.trainer.surface.parts import TrainerParts

__all__ = ["check_fits", "restore_in_shards", "restore_modules_and_callbacks", "restore_training_state"]

# Number of keys of each kind that an error lists.
_MOST_KEYS = 6

# Where Lightning's WeightAveraging keeps the weights that training continues with; those in "state_dict" are averaged.
_TRAINED = "current_model_state"

# Entries without which a training cannot continue.
_REQUIRED_TO_TRAIN = ("loops", "optimizer_states", "lr_schedulers")


# Before the module is placed


def restore_modules_and_callbacks(
    state: RunState, module: LightningModule, strategy: Strategy, hooks: Hooks, checkpoint: dict[str, Any]
) -> None:
    """Load module, data module and callbacks, before the module is placed.

    If the strategy shards the module, its weights and the callbacks that copy them follow by `restore_in_shards`.
    """
    is_sharded = strategy.portable.is_sharded
    _let_module_mend(hooks, checkpoint, fitting=state.fitting)
    # The callbacks' hooks below may read the weights, too.
    present = module.state_dict()
    for key in ("state_dict", _TRAINED):
        if isinstance(checkpoint.get(key), dict):
            checkpoint[key] = with_present_names(checkpoint[key], present)

    # The checkpoint may lack weights since such a callback left them out.
    _warn_of_absent_callbacks(state.callbacks, checkpoint)

    # 1. The module.
    if not is_sharded:
        _restore_weights(state, module, strategy, checkpoint)

    # 2. The data module.
    datamodule = hooks.datamodule
    if datamodule is not None:
        key = type(datamodule).__qualname__
        if key in checkpoint:
            with loading(key, datamodule):
                hooks.call_datamodule("load_state_dict", checkpoint[key])

    # 3. The callbacks.
    _restore_callbacks(state, strategy, hooks, checkpoint, copying=False if is_sharded else None)


def restore_in_shards(
    state: RunState, module: LightningModule, strategy: Strategy, hooks: Hooks, checkpoint: dict[str, Any]
) -> None:
    """Load the weights, and the callbacks that copy them, after the module was sharded."""
    _restore_weights(state, module, strategy, checkpoint)
    _restore_callbacks(state, strategy, hooks, checkpoint, copying=True)


def _restore_weights(state: RunState, module: LightningModule, strategy: Strategy, checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"] = completed(checkpoint["state_dict"], module, state.callbacks)
    if module.strict_loading:
        check_fits(module, checkpoint["state_dict"])
    with loading("state_dict"):
        strategy.portable.load_module_state(module, checkpoint["state_dict"], strict=module.strict_loading)
    strategy.portable.load_further_entries(checkpoint)


def _let_module_mend(hooks: Hooks, checkpoint: dict[str, Any], *, fitting: bool) -> None:
    """Call the module's `on_load_checkpoint`; if it changes averaged weights, a second time for the trained ones."""
    trained = dict(checkpoint, state_dict=checkpoint.get(_TRAINED))
    before = _marks_of(checkpoint["state_dict"])
    hooks.call_module("on_load_checkpoint", checkpoint)
    if not fitting or not isinstance(trained["state_dict"], dict):
        return
    if _marks_of(checkpoint["state_dict"]) != before:
        hooks.call_module("on_load_checkpoint", trained)
        checkpoint[_TRAINED] = trained["state_dict"]


def _marks_of(state: dict[str, Any]) -> Any:
    """Return what differs once a name or a value of a state has changed, also in place."""
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    return [(name, id(value)) for name, value in state.items()], versions(tensors)


def _monitors_here(processes: Processes, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the states of callbacks whose monitored values differed between as many processes as there are now."""
    positions = checkpoint.get(OUR_KEY, {}).get("positions", [])
    if len(positions) != processes.world_size:
        return {}
    states: dict[str, Any] = positions[processes.rank].get("monitors", {})
    return states


def _warn_of_absent_callbacks(callbacks: Iterable[Callback], checkpoint: dict[str, Any]) -> None:
    states = checkpoint.get("callbacks") or {}
    absent = states.keys() - {state_key_of(callback) for callback in callbacks}
    if absent:
        rank_zero_warn(
            f"The checkpoint holds states of callbacks that are missing: {sorted(map(str, absent))}. Add the"
            " callbacks to restore these states."
        )


def _restore_callbacks(
    state: RunState, strategy: Strategy, hooks: Hooks, checkpoint: dict[str, Any], *, copying: bool | None
) -> None:
    if checkpoint.get("callbacks") is None:
        return
    states = {**checkpoint["callbacks"], **_monitors_here(strategy.processes.data, checkpoint)}
    hooks.call_callbacks("on_load_checkpoint", checkpoint, copying=copying)
    for callback in state.callbacks:
        if copying is not None and copying != copies_weights(callback):
            continue
        key = state_key_of(callback)
        callback_state = states.get(key)
        if callback_state:
            with loading(f"callbacks[{key!r}]", callback):
                callback.load_state_dict(_present_state(state, strategy.processes, callback, deepcopy(callback_state)))


def _present_state(
    state: RunState, processes: Processes, callback: Any, callback_state: dict[str, Any]
) -> dict[str, Any]:
    """Return the state that a callback continues with: files of an earlier folder are those of the run."""
    if not is_a(callback, ModelCheckpoint):
        return callback_state
    return in_present_folder(callback, callback_state, state.loaded_ckpt_path, state.checkpoint_io, processes)


def check_fits(module: nn.Module, state: dict[str, Any]) -> None:
    """Check that a state belongs to a module.

    Raises:
        CheckpointError: Naming the keys that are missing, unexpected or of another shape.
    """
    # 1. Compare the keys, and the shapes of those that both have.
    expected = module.state_dict()
    missing = [key for key in expected if key not in state]
    unexpected = [key for key in state if key not in expected]
    shapes = []
    kinds = []
    for key, value in expected.items():
        if key not in state or not isinstance(value, Tensor):
            continue
        loaded = state[key]
        if not isinstance(loaded, Tensor):
            kinds.append(f"{key} is a {type(loaded).__name__}")
        elif loaded.shape != value.shape:
            shapes.append(f"{key} {list(loaded.shape)} for {list(value.shape)}")
    problems = {
        "missing": missing,
        "unexpected": unexpected,
        "of another shape": shapes,
        "not tensors": kinds,
    }

    # 2. List them.
    texts = []
    for name, keys in problems.items():
        if not keys:
            continue
        listed = ", ".join(keys[:_MOST_KEYS])
        if len(keys) > _MOST_KEYS:
            listed += " ..."
        texts.append(f"{name}: {listed}")
    if not texts:
        return
    way_out = "Build the model as it was."
    untrained = parts_without_weights(missing, expected)
    # Loose loading skips keys, but no shapes; a part without any weight would begin anew unnoticed.
    if untrained:
        way_out = f"Build the model as it was. The file holds no weight of {', '.join(untrained[:_MOST_KEYS])}."
    elif not shapes and not kinds:
        way_out = "Build the model as it was, or set `strict_loading = False` in it."
    kind = type(module).__name__
    differences = "; ".join(texts)
    raise CheckpointError(f"The checkpoint is of another model than {kind}: {differences}. {way_out}")


# After the optimisers were created


def restore_training_state(parts: TrainerParts, module: LightningModule, checkpoint: dict[str, Any], path: Any) -> str:
    """Load counters, scaler, optimisers and schedulers, after `configure_optimizers`; a file of weights has none.

    Returns:
        What was restored, for a message.

    Raises:
        CheckpointError: If the checkpoint holds weights only.
        ConfigurationError: If it is beyond `max_epochs`.
    """
    # 1. The scaler of the loss.
    precision = parts.precision
    key = precision.checkpoint_key
    if key in checkpoint:
        with loading(key):
            check_like(precision.state_dict(), checkpoint[key], key)
            precision.load_state_dict(checkpoint[key])

    # 2. The counters.
    state = parts.state
    if not state.fitting:
        return "Loaded model weights"
    if format_of(path, state.checkpoint_io) is not None:
        return "Training begins anew, with the model weights"
    _check_can_train(checkpoint)
    _restore_counters(parts, checkpoint["loops"])
    if state.max_epochs is not None and 0 <= state.max_epochs < state.current_epoch:
        raise ConfigurationError(
            f"The checkpoint is at epoch {state.current_epoch}, beyond max_epochs={state.max_epochs}. Raise"
            " max_epochs to continue."
        )

    # 3. The position in the epoch.
    entry = checkpoint.get(OUR_KEY, {})
    parts.strategy.portable.load_strategy_state(entry.get("strategy", {}))
    with loading(OUR_KEY):
        parts.fit_loop.resume(checkpoint["loops"]["fit_loop"], entry)
        saved = entry.get("checkpoint_callbacks", {})
        load_saving_states(state.callbacks, saved)
        later_files = files_written_after(path, state.callbacks, saved, completion_time)
    parts.fit_loop.later_files = parts.strategy.processes.broadcast(later_files)

    # 4. The optimisers.
    weights = checkpoint.get("state_dict", {})
    _restore_optimizers(state.optimizers, module, parts.strategy, checkpoint["optimizer_states"], weights)
    _restore_schedulers(state, checkpoint["lr_schedulers"])
    return "Restored all states"


def _check_can_train(checkpoint: dict[str, Any]) -> None:
    lacking = [key for key in _REQUIRED_TO_TRAIN if key not in checkpoint]
    if lacking:
        raise CheckpointError(
            f"Training cannot resume from this checkpoint: it lacks {', '.join(lacking)}. Was it saved with"
            " save_weights_only=True? To start anew from"
            " its weights, load them with `load_from_checkpoint` and leave out ckpt_path."
        )


def _restore_counters(parts: TrainerParts, loop_states: dict[str, Any]) -> None:
    try:
        parts.state.progress.load_state_dict(loop_states["fit_loop"])
        for name in ("validate", "test"):
            progress = parts.evaluations[name].progress
            saved = loop_states.get(f"{name}_loop", {})
            if "batch_progress" in saved:
                progress.load_state_dict(saved["batch_progress"])
    except KeyError as error:
        raise CheckpointError(
            f"Training cannot resume from this checkpoint: the counter {error} is missing. Take another one."
        ) from error


def _restore_optimizers(
    optimizers: Sequence[Optimizer],
    module: LightningModule,
    strategy: Strategy,
    states: list[dict[str, Any]],
    weights: dict[str, Any],
) -> None:
    if len(states) != len(optimizers):
        raise CheckpointError(
            f"The checkpoint holds {len(states)} optimiser state(s), but `configure_optimizers` returned"
            f" {len(optimizers)}. Let it return as many as then, or begin a new run from the weights, with"
            " `load_from_checkpoint` and without ckpt_path."
        )
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    saved_dtypes = {
        identity: weights[name].dtype for identity, name in names.items() if isinstance(weights.get(name), Tensor)
    }
    for index, (optimizer, saved) in enumerate(zip(optimizers, states, strict=True)):
        entry = f"optimizer_states[{index}]"
        with loading(entry, optimizer):
            _check_kind(index, optimizer, saved)
            check_optimizer_state(saved, entry)
            check_optimizer_shapes(optimizer, saved, names)
            _load_optimizer(strategy, index, optimizer, saved)
            restore_dtypes(optimizer, saved, saved_dtypes)


def _check_kind(index: int, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Check that a state is of the same kind of optimiser: one of another kind has other options."""
    # Switches are left out, since new ones come with every version of torch.
    defaults = getattr(optimizer, "defaults", {})
    options = [name for name, value in defaults.items() if not isinstance(value, bool | None)]
    for group in state.get("param_groups", ()):
        lacking = [name for name in options if name not in group]
        if lacking:
            raise CheckpointError(
                f"The state of optimiser {index} in the checkpoint is of another kind than {type(optimizer).__name__}:"
                f" it lacks {', '.join(lacking)}. Let `configure_optimizers` return what it returned then."
            )
        check_like(defaults, group, f"optimizer_states[{index}]['param_groups']")


def _load_optimizer(strategy: Strategy, index: int, optimizer: Optimizer, state: dict[str, Any]) -> None:
    try:
        strategy.portable.load_optimizer_state(optimizer, with_present_choice(optimizer, state))
    except ValueError as error:
        raise CheckpointError(
            f"The state of optimiser {index} ({type(optimizer).__name__}) in the checkpoint does not fit: {error}."
            " Let `configure_optimizers` return what it returned then."
        ) from error


def _restore_schedulers(state: RunState, saved_states: list[dict[str, Any]]) -> None:
    configs: list[LRSchedulerConfig] = state.lr_scheduler_configs
    # A scheduler that was added or removed since then is no error, as in Lightning.
    for index, (config, saved) in enumerate(zip(configs, saved_states, strict=False)):
        entry = f"lr_schedulers[{index}]"
        with loading(entry, config.scheduler):
            check_like(config.scheduler.state_dict(), saved, entry)
            _check_length(config.scheduler, saved)
            config.scheduler.load_state_dict(saved)


def _check_length(scheduler: Any, state: dict[str, Any]) -> None:
    """Check that a scheduler for a number of steps, such as OneCycleLR, can continue to the end of this run."""
    planned = getattr(scheduler, "total_steps", None)
    saved = state.get("total_steps")
    if not isinstance(planned, int) or not isinstance(saved, int):
        return
    if saved < planned:
        raise ConfigurationError(
            f"The checkpoint's {type(scheduler).__name__} was made for {saved} steps, but this run makes {planned}: its"
            " schedule ends before. Train as long as was planned then, choose a scheduler that has no end, or begin a"
            " new run from the weights, with `load_from_checkpoint` and without ckpt_path."
        )
