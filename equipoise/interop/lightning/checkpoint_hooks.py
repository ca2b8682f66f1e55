"""ModelCheckpoint's hooks as they are called here, so that files hold what their names say.

Lightning's callback ranks files by values that it finds when a step ends. A value of the validation then belongs to
weights of an earlier step. Here a save that is due waits for the next validation, as Lightning's does where there is no
value yet. The last file (`save_last=True`), from which a killed run resumes, is written immediately all the same.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

__all__ = ["FitFacts", "hook_of_checkpoint"]

Hook = Callable[..., Any]

# Hooks in which the callback saves.
_SAVING_HOOKS = ("on_train_batch_end", "on_train_epoch_end", "on_validation_end", "on_train_end")

# What is needed of the callback; without it, its hooks are called as they are.
_NEEDED_NAMES = (
    "_defer_save_until_validation",
    "_last_checkpoint_saved",
    "_last_global_step_saved",
    "_monitor_candidates",
    "_save_last_checkpoint",
    "_save_on_train_epoch_end",
    "_should_remove_checkpoint",
)


class FitFacts(Protocol):
    """What the hooks of checkpoints ask of a fit.

    Attributes:
        later_files: Files that are newer than the checkpoint that this run resumes from. It writes them again, so they
            may be replaced.
        last_writes: The steps at which callbacks have written their last files before the validation, by their keys.
    """

    later_files: set[str]
    last_writes: dict[str, int]

    def is_of_this_run(self, path: str) -> bool:
        """Return True if this run wrote a checkpoint, or the run that it resumes from; called in the main process."""

    def is_validated(self, name: str) -> bool:
        """Return True if the validation alone logs a value; called in all processes together."""

    def validates_next(self) -> bool:
        """Return True if validation follows the present batch immediately."""

    def has_skipped_step(self) -> bool:
        """Return True if the scaler of the loss has skipped the last optimiser step."""


def hook_of_checkpoint(callback: Callback, name: str, method: Hook, fit: FitFacts | None) -> Hook:
    """Return a hook of a callback as it is to be called; that of a ModelCheckpoint saves weights with their value.

    Args:
        callback: Any callback.
        name: The hook's name.
        method: The hook.
        fit: The fit; None outside of one.
    """
    if fit is None or name not in _SAVING_HOOKS or not isinstance(callback, ModelCheckpoint):
        return method
    if name == "on_train_end":
        method = _not_in_fast_dev_run(method)
    if not all(hasattr(callback, needed) for needed in _NEEDED_NAMES):
        return method
    hooks = _CheckpointHooks(callback, fit)
    if callback.monitor is not None:
        if name == "on_train_batch_end":
            method = hooks.at_batch_end(method)
        elif name == "on_validation_end":
            method = hooks.at_validation_end(method)
    if fit.later_files:
        method = hooks.with_method(method, "file_exists", hooks.is_kept)
    if "://" in str(callback.dirpath):
        method = hooks.with_method(method, "_should_remove_checkpoint", hooks.may_remove)
    return method


def _not_in_fast_dev_run(method: Hook) -> Hook:
    """Return a hook that does nothing in a `fast_dev_run`, in which Lightning's writes the last file all the same."""

    def save(trainer: Any, *args: Any) -> None:
        if not trainer.fast_dev_run:
            method(trainer, *args)

    return save


class _CheckpointHooks:
    """Hooks of a ModelCheckpoint, and methods that are replaced during one; they use its private attributes."""

    def __init__(self, callback: Any, fit: FitFacts) -> None:
        self._callback = callback
        self._fit = fit

    def with_method(self, hook: Hook, name: str, replacement: Callable[..., Any]) -> Hook:
        """Return a hook during which the callback calls a function in place of one of its methods."""

        def call(*args: Any) -> None:
            with _replaced(self._callback, name, replacement):
                hook(*args)

        return call

    # A value of the validation.

    def at_batch_end(self, method: Hook) -> Hook:
        """Return a hook that waits for the validation which computes the value of the present weights."""
        callback = self._callback
        # 1. The steps at which a save may be due: any, if the callback saves by the clock or has a hook of its own, or
        #    in a version of Lightning without these names.
        every = getattr(callback, "_every_n_train_steps", 1)
        saves_by_time = not hasattr(callback, "_train_time_interval") or callback._train_time_interval is not None
        is_changed = type(callback).on_train_batch_end is not ModelCheckpoint.on_train_batch_end
        saves_at_any_time = saves_by_time or is_changed

        def save_or_wait(trainer: Any, *args: Any) -> None:
            if not saves_at_any_time and (every < 1 or trainer.global_step % every):
                return
            # 2. Call the hook. It sets its flag if the value is missing, so the flag tells whether this step must wait.
            was_waiting = callback._defer_save_until_validation
            callback._defer_save_until_validation = False
            with _replaced(callback, "_monitor_candidates", self._present_values):
                method(trainer, *args)
            # 3. What has waited before waits further.
            is_saved = callback._last_global_step_saved == trainer.global_step
            must_wait = callback._defer_save_until_validation and not is_saved
            callback._defer_save_until_validation = was_waiting or must_wait
            if must_wait and callback.save_last is True:
                self._save_last_now(trainer)

        return save_or_wait

    def _present_values(self, trainer: Any) -> dict[str, Any]:
        """Return the values that belong to the present weights; called when a save is due."""
        callback = self._callback
        values: dict[str, Any] = type(callback)._monitor_candidates(callback, trainer)
        name = callback.monitor
        value = values.get(name)
        if isinstance(value, Tensor):
            value = value.cpu()
        is_validated = self._fit.is_validated(name)
        # All processes take the view of the main one, which may have logged a value alone.
        is_validated, value = trainer.strategy.broadcast((is_validated, value))
        if is_validated:
            values.pop(name, None)
        elif name not in values and value is not None:
            values[name] = torch.as_tensor(value, device=trainer.strategy.root_device)
        return values

    def _save_last_now(self, trainer: Any) -> None:
        """Write the last file without its rank. The step counts as not saved, so that the validation may save it."""
        callback = self._callback
        key = callback.state_key
        # The hook comes here after each micro-batch of a window, in which the step stays the same.
        if self._fit.last_writes.get(key) == trainer.global_step or self._fit.validates_next():
            return
        self._fit.last_writes[key] = trainer.global_step
        before = (callback._last_global_step_saved, callback._last_checkpoint_saved)
        callback._save_last_checkpoint(trainer, type(callback)._monitor_candidates(callback, trainer))
        callback._last_global_step_saved, callback._last_checkpoint_saved = before

    def at_validation_end(self, method: Hook) -> Hook:
        """Return a hook that saves what has waited, also if the callback saves at the ends of epochs.

        Its hook would then return before it looks at what has waited.
        """
        callback = self._callback

        def save_what_waits(trainer: Any, *args: Any) -> None:
            is_logged = callback.monitor in trainer.callback_metrics
            if not callback._defer_save_until_validation or not is_logged:
                method(trainer, *args)
                return
            saves_on_epoch_end = callback._save_on_train_epoch_end
            callback._save_on_train_epoch_end = False
            try:
                method(trainer, *args)
            finally:
                callback._save_on_train_epoch_end = saves_on_epoch_end

        return save_what_waits

    # Files of a run that was resumed in another folder.

    def may_remove(self, trainer: Any, previous: str, current: str) -> bool:
        """Return True if a file of the callback's own folder is to be removed; on a store Lightning removes any."""
        callback = self._callback
        folder = str(callback.dirpath).rstrip("/")
        if not str(previous).startswith(f"{folder}/"):
            return False
        return bool(type(callback)._should_remove_checkpoint(callback, trainer, previous, current))

    # Files that the run wrote before it was resumed.

    def is_kept(self, filepath: Any, trainer: Any) -> bool:
        """Return True if a file exists that this run must not replace; Lightning replaces none."""
        if not type(self._callback).file_exists(self._callback, filepath, trainer):
            return False
        path = str(filepath)
        later_files = self._fit.later_files
        # Names with values may differ between processes; the main one writes.
        is_replaced = trainer.is_global_zero and path in later_files and self._fit.is_of_this_run(path)
        later_files.discard(path)
        if is_replaced:
            rank_zero_info(f"ModelCheckpoint replaces {path!r}, which this run wrote before it was resumed.")
        return not trainer.strategy.broadcast(is_replaced)


@contextmanager
def _replaced(callback: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let a callback call a function in place of a method of its class."""
    attributes = vars(callback)
    before = attributes.get(name)
    attributes[name] = function
    try:
        yield
    finally:
        del attributes[name]
        if before is not None:
            attributes[name] = before
