"""Private names of the callbacks of Lightning, checkpoints above all.

Each name has a comment with the reason why no public one suffices, and a default for versions without it.
"""

import copy
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import nn

from equipoise.interop.lightning.checkpoint_hooks import FitFacts
from equipoise.interop.lightning.classes import base_of, is_a, is_stock
from equipoise.interop.remote.paths import to_path

__all__ = [
    "cannot_fire",
    "copies_of",
    "copies_weights",
    "copying_callbacks",
    "files_written_after",
    "is_finder",
    "is_stock_finder",
    "last_checkpoints",
    "load_saving_states",
    "looks_after_training_epochs",
    "saving_states",
    "with_average_begun",
    "with_buffers_kept",
    "with_latest_answer",
    "without_skipped_steps",
]


def is_finder(callback: Any) -> bool:
    """Return True for a callback of Lightning's tuner."""
    return is_a(callback, BatchSizeFinder, LearningRateFinder)


def is_stock_finder(callback: Any) -> bool:
    """Return True for one of Lightning's finders itself; a class derived from it may search at other times."""
    return is_stock(callback, BatchSizeFinder, LearningRateFinder)


def cannot_fire(callback: Callback, hook: str) -> bool:
    """Return True if a callback's hook has nothing to do here.

    A checkpoint callback's per-batch hook needs 14 µs to do nothing; the intervals at which it saves have only private
    names. Lightning's finders search in their hooks, inside Lightning's own loops; here they search before the fit.
    """
    if is_stock_finder(callback):
        return True
    if hook != "on_train_batch_end" or not is_a(callback, ModelCheckpoint):
        return False
    stock_class = base_of(callback, ModelCheckpoint)
    if type(callback).on_train_batch_end is not stock_class.on_train_batch_end:
        return False
    # Without the names, the hook is called.
    saves_by_steps = getattr(callback, "_every_n_train_steps", 1) >= 1
    saves_by_time = getattr(callback, "_train_time_interval", 0) is not None
    return not saves_by_steps and not saves_by_time


# The step at which WeightAveraging has updated its weights last. Nothing public lets it pass over a step.
_LATEST_UPDATE = "_latest_update_step"


def without_skipped_steps(
    callback: Callback, hook: str, method: Callable[..., Any], fit: FitFacts | None
) -> Callable[..., Any]:
    """Return a hook of a callback as it is to be called; that of an average leaves out steps that changed no weight.

    Without the name, such steps are averaged, as by Lightning.

    Args:
        callback: Any callback.
        hook: The hook's name.
        method: The hook.
        fit: The fit; None outside of one.
    """
    if fit is None or hook != "on_train_batch_end" or not is_a(callback, WeightAveraging):
        return method
    if not hasattr(callback, _LATEST_UPDATE):
        return method

    def average(trainer: Any, *args: Any) -> None:
        if fit.has_skipped_step():
            setattr(callback, _LATEST_UPDATE, trainer.global_step)
        method(trainer, *args)

    return average


def with_average_begun(callback: Callback, hook: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook of a callback as it is to be called; an average is that of the trained weights from the beginning.

    Before its first update, WeightAveraging would validate, save and leave the weights with which training began. The
    average itself has only a private name; without it, it does so, as in Lightning.

    Args:
        callback: Any callback.
        hook: The hook's name.
        method: The hook.
    """
    if hook not in ("on_validation_epoch_start", "on_save_checkpoint", "on_train_end"):
        return method
    if not is_a(callback, WeightAveraging):
        return method

    def use_average(trainer: Any, module: nn.Module, *args: Any) -> None:
        average = getattr(callback, "_average_model", None)
        if average is not None and average.n_averaged == 0:
            # The first update copies the weights. It counts as none: the next one is the first again.
            average.update_parameters(module)
            average.n_averaged.zero_()
        method(trainer, module, *args)

    return use_average


def copies_weights(callback: Any) -> bool:
    """Return True if a callback copies the module when it is set up, as averages of the weights do.

    Args:
        callback: Any callback.
    """
    if is_a(callback, WeightAveraging, StochasticWeightAveraging):
        return True
    # A mock has every attribute.
    return getattr(callback, "copies_weights", False) is True


def with_buffers_kept(callback: Callback, hook: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook of a callback as it is to be called; what replaces buffers changes their values instead.

    StochasticWeightAveraging replaces statistics of batches by tensors on the device of the module, but a layer of a
    pipeline may lie on another one.

    Args:
        callback: Any callback.
        hook: The hook's name.
        method: The hook.
    """
    if hook != "on_train_epoch_start" or not is_a(callback, StochasticWeightAveraging):
        return method

    def start(trainer: Any, module: nn.Module) -> None:
        buffers = [(part, *item) for part in module.modules() for item in part.named_buffers(recurse=False)]
        method(trainer, module)
        for part, name, buffer in buffers:
            buffer.copy_(getattr(part, name))
            setattr(part, name, buffer)

    return start


def with_latest_answer(
    callback: Callback, hook: str, method: Callable[..., Any], stop_requests: set[str]
) -> Callable[..., Any]:
    """Return a hook of a callback as it is to be called; EarlyStopping withdraws a request once its value recovers.

    The request may wait for `min_epochs` or `min_steps`, and EarlyStopping can only make one.

    Args:
        callback: Any callback.
        hook: The hook's name.
        method: The hook.
        stop_requests: The keys of those who have asked training to stop; the hook changes it.
    """
    if hook not in ("on_validation_end", "on_train_epoch_end") or not isinstance(callback, EarlyStopping):
        return method
    key = callback.state_key

    def check(trainer: Any, module: nn.Module) -> None:
        requests = set(stop_requests)
        count = callback.wait_count
        best = callback.best_score
        # Without the requests of others, the answer is its own.
        stop_requests.clear()
        method(trainer, module)
        if stop_requests:
            requests.add(key)
        elif callback.wait_count != count or callback.best_score is not best:
            requests.discard(key)
        stop_requests.clear()
        stop_requests.update(requests)

    return check


def copying_callbacks(module: nn.Module) -> list[Any]:
    """Return the callbacks of a module's trainer that copy the module, as averages of the weights do.

    Args:
        module: The module.
    """
    callbacks = getattr(getattr(module, "trainer", None), "callbacks", ())
    return [callback for callback in callbacks if copies_weights(callback)]


def copies_of(module: nn.Module) -> list[nn.Module]:
    """Return the copies of a module that the callbacks of its trainer have.

    Args:
        module: The module.
    """
    values = [value for callback in copying_callbacks(module) for value in vars(callback).values()]
    copies = []
    for value in values:
        # It may be within an AveragedModel.
        parts = value.modules() if isinstance(value, nn.Module) else ()
        copied = next((part for part in parts if type(part) is type(module)), module)
        if copied is not module:
            copies.append(copied)
    return copies


def looks_after_training_epochs(callback: Any) -> bool:
    """Return True if early stopping looks at the end of training epochs. By default it decides that in `setup`.

    Without the name, Lightning's own error says later that there is nothing to monitor.
    """
    return bool(getattr(callback, "_check_on_train_epoch_end", False))


def last_checkpoints(callback: ModelCheckpoint, trainer: Any) -> set[str]:
    """Return the files that a checkpoint callback calls its last, also those of an earlier process.

    Args:
        callback: The callback.
        trainer: The trainer, whose loggers and root directory choose the folder if the user has not.
    """
    # 1. The folder, which `setup` sets. The callback itself is set up later.
    resolved = copy.copy(callback)
    base_of(callback, ModelCheckpoint).setup(resolved, trainer, trainer.lightning_module, "validate")
    folder = to_path(resolved.dirpath or "")
    if not folder.is_dir():
        return set()

    # 2. Its files: "last.ckpt", and "last-v1.ckpt" beside a file of that name.
    last = set()
    for path in folder.iterdir():
        if path.name.startswith(callback.CHECKPOINT_NAME_LAST) and path.name.endswith(callback.FILE_EXTENSION):
            last.add(str(path))
    return last


def files_written_after(
    path: str | Path,
    callbacks: Iterable[Callback],
    states: dict[str, dict[str, Any]],
    time_of: Callable[[str | os.PathLike[str]], int | None],
) -> set[str]:
    """Return files that are newer than a checkpoint, and links, in the folders where checkpoint callbacks continue.

    Args:
        path: The checkpoint.
        callbacks: The callbacks of the run.
        states: The states that `saving_states` returned for the checkpoint.
        time_of: Returns the time at which a checkpoint was written; None for one that is not complete, which counts as
            newer.
    """
    files: set[str] = set()
    for callback in callbacks:
        if not isinstance(callback, ModelCheckpoint) or not callback.dirpath:
            continue
        if states.get(callback.state_key, {}).get("dirpath") != callback.dirpath:
            continue
        # A folder may be gone.
        with suppress(OSError):
            written = time_of(path) or 0
            for file in to_path(callback.dirpath).glob(f"*{callback.FILE_EXTENSION}"):
                time = time_of(file)
                # A link to the checkpoint itself is as old, but was made behind it.
                is_link = isinstance(file, Path) and file.is_symlink()
                if time is None or time > written or is_link:
                    files.add(str(file))
    return files


# ModelCheckpoint leaves these out of its state: the step and the path of its last file, and whether it waits for the
# validation to save. Without them, a resumed run saves a step again within an accumulation window.
_SAVING = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")


def saving_states(
    callbacks: Iterable[Callback],
    writer: Callback | None,
    path: str | None,
    step: int,
    hook: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Return what checkpoint callbacks note about their last files; their `state_dict` leaves it out.

    Args:
        callbacks: The callbacks of the run.
        writer: The callback that writes a file now. It notes the file only afterwards.
        path: Path of that file.
        step: The present step.
        hook: The hook in which it writes. Default: None, in none.
    """
    states = {}
    for callback in callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        state: dict[str, Any] = {"dirpath": callback.dirpath}
        for name in _SAVING:
            if hasattr(callback, name):
                state[name.lstrip("_")] = getattr(callback, name)
        # The file that is being written now counts as the last one, unless its step waits for the validation.
        waits = hook == "on_train_batch_end" and state.get("defer_save_until_validation", False)
        if callback is writer and not (waits and path == callback.last_model_path):
            state["last_global_step_saved"] = step
            state["last_checkpoint_saved"] = path
            # What waited for the validation is done after the write.
            if hook == "on_validation_end":
                state["defer_save_until_validation"] = False
        states[callback.state_key] = state
    return states


def load_saving_states(callbacks: Iterable[Callback], states: dict[str, dict[str, Any]]) -> None:
    """Restore what `saving_states` returned, for callbacks that still write to the same folder.

    Args:
        callbacks: The callbacks of the run.
        states: The states, by the keys of the callbacks.
    """
    for callback in callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        state = states.get(callback.state_key)
        if state is None:
            continue
        # The last file is not in the new folder.
        if state["dirpath"] != callback.dirpath:
            continue
        for name in _SAVING:
            key = name.lstrip("_")
            if key in state and hasattr(callback, name):
                setattr(callback, name, state[key])
