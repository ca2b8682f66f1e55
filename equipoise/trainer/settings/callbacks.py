"""Callbacks of a run: the user's, the default ones, and those of the module."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Checkpoint,
    LearningRateFinder,
    ModelCheckpoint,
    ModelSummary,
    Timer,
)
from lightning.pytorch.callbacks import ProgressBar as LightningProgressBar
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.errors import ConfigurationError, ConfigurationRuntimeError
from equipoise.interop.lightning.callbacks import is_finder, is_stock_finder
from equipoise.interop.lightning.classes import is_a
from equipoise.trainer.hooks.hooks import overrides, state_key_of
from equipoise.trainer.settings.arguments import Duration, seconds_of

if TYPE_CHECKING:
    from equipoise.trainer.state.run_state import RunState

__all__ = ["merge_callbacks", "refuse_finders", "select_callbacks"]


def select_callbacks(
    callbacks: list[Callback] | Callback | None,
    *,
    enable_checkpointing: bool,
    enable_progress_bar: bool,
    enable_model_summary: bool,
    max_time: Duration | None,
    barebones: bool = False,
    complete: Callable[[Sequence[Any]], list[Any]] | None = None,
) -> list[Callback]:
    """Return the user's callbacks and the default ones, in the order in which they fire.

    Args:
        callbacks: The user's: one, several, or None.
        enable_checkpointing: Whether there is a checkpoint callback.
        enable_progress_bar: Whether there is a progress bar.
        enable_model_summary: Whether there is a summary of the model.
        max_time: The time after which training stops. None: no limit.
        barebones: Whether `barebones` is the reason why a callback is off. Default: False.
        complete: Adds those that the precision needs to the user's. Default: None, it needs none.

    Raises:
        ConfigurationError: If one contradicts an argument, or cannot run here.
    """
    selected = _as_list(callbacks)
    for callback in selected:
        _check_callback(callback)
    if complete is not None:
        selected = complete(selected)
    reason = "{}=False"
    if barebones:
        reason = "barebones=True sets {}=False, which"

    # 1. Checkpoints.
    checkpoint_reason = reason.format("enable_checkpointing")
    selected += _default(selected, Checkpoint, ModelCheckpoint, checkpoint_reason, enable_checkpointing)

    # 2. The limit of time.
    if max_time is not None:
        seconds_of("max_time", max_time)
        if _holds(selected, Timer):
            rank_zero_info("max_time is left aside: there is a Timer among the callbacks.")
        else:
            selected.append(Timer(duration=max_time))

    # 3. The progress bar. It comes first, so that text that other callbacks print at the end is below its last line.
    bars = [type(callback).__name__ for callback in selected if is_a(callback, LightningProgressBar)]
    if len(bars) > 1:
        raise ConfigurationError(
            f"There can be one progress bar, but callbacks hold {len(bars)}: {', '.join(bars)}. Keep one of them."
        )
    bar_reason = reason.format("enable_progress_bar")
    default_bar = _default(selected, LightningProgressBar, _progress_bar, bar_reason, enable_progress_bar)
    selected = default_bar + selected

    # 4. The summary.
    if enable_model_summary and not _holds(selected, ModelSummary):
        from equipoise.tables.model_summary import WholeModelSummary

        selected.append(WholeModelSummary())

    _check_state_keys(selected)
    return _order(selected)


def _as_list(callbacks: Any) -> list[Callback]:
    if callbacks is None:
        return []
    # A text is iterable, and refused later, as a whole.
    if isinstance(callbacks, Iterable) and not isinstance(callbacks, str):
        return list(callbacks)
    return [callbacks]


def _holds(callbacks: list[Callback], kind: type) -> bool:
    return any(is_a(callback, kind) for callback in callbacks)


# Hooks that a run calls on every callback, whether it has a state or not.
_OF_STATE = ("state_dict", "load_state_dict", "on_save_checkpoint", "on_load_checkpoint")
_HOOKS = [
    name
    for name, value in vars(Callback).items()
    if callable(value) and not name.startswith("_") and name not in _OF_STATE
]


def _check_callback(callback: Any) -> None:
    """Check that a run can call a callback: it is a Callback, or has all hooks of one, as a mock has."""
    if isinstance(callback, type):
        raise ConfigurationError(
            f"callbacks holds the class {callback.__name__}. Pass an object: {callback.__name__}(...)."
        )
    has_all_hooks = all(callable(getattr(callback, name, None)) for name in _HOOKS)
    if not has_all_hooks and not is_a(callback, Callback):
        raise ConfigurationError(
            f"callbacks must be a Callback of Equipoise or Lightning, or a list of them, but it holds {callback!r} of"
            f" type {type(callback).__name__}."
        )
    _refuse_derived_finder(callback)


def _default(
    callbacks: list[Callback], kind: type, default: Callable[[], Callback], reason: str, enabled: bool
) -> list[Callback]:
    """Return the default callback of a kind, unless there is one or the kind is off."""
    for callback in callbacks:
        if not is_a(callback, kind):
            continue
        if enabled:
            return []
        raise ConfigurationError(
            f"{reason} contradicts {type(callback).__name__} among the callbacks. Leave one of them out."
        )
    if enabled:
        return [default()]
    return []


def _progress_bar() -> Callback:
    from equipoise.callbacks.progress.progress_bar import ProgressBar

    return ProgressBar()


def _check_state_keys(callbacks: list[Callback]) -> None:
    """Check that a checkpoint can distinguish the states of callbacks."""
    keys = [state_key_of(callback) for callback in callbacks if overrides(callback, "state_dict", Callback)]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigurationRuntimeError(
                f"Two callbacks would save their state under the same key {key!r}. Give them different arguments,"
                " or a `state_key`."
            )


def _order(callbacks: list[Callback]) -> list[Callback]:
    """Sort checkpoint callbacks to the end, where they save the state that the other callbacks have left."""
    return sorted(callbacks, key=lambda callback: is_a(callback, Checkpoint))


def merge_callbacks(callbacks: list[Callback], module_callbacks: list[Callback]) -> list[Callback]:
    """Return the trainer's callbacks and those of `configure_callbacks`, which replace others of their class.

    Args:
        callbacks: The trainer's.
        module_callbacks: The result of the module's `configure_callbacks`.

    Raises:
        ConfigurationError: If one of the module's cannot run here, or is a finder: its search would be over by then.
    """
    if not module_callbacks:
        return callbacks
    for callback in module_callbacks:
        _check_callback(callback)
        if is_finder(callback):
            raise ConfigurationError(
                f"`configure_callbacks` returned a {type(callback).__name__}, which searches before the run that calls"
                " `configure_callbacks`. Instead, pass it to Trainer(callbacks=...)."
            )
    kept_callbacks = [callback for callback in callbacks if not _is_replaced(callback, module_callbacks)]
    return _order(kept_callbacks + module_callbacks)


def _is_replaced(callback: Callback, module_callbacks: list[Callback]) -> bool:
    kind = type(callback)
    # Every callback is derived from the base class.
    if kind is Callback:
        return False
    return any(issubclass(type(other), kind) for other in module_callbacks)


# Finders of Lightning


def _refuse_derived_finder(callback: Any) -> None:
    """Refuse a callback that is derived from a finder; Lightning's finders themselves search before a fit."""
    if is_stock_finder(callback):
        return
    for kind in (BatchSizeFinder, LearningRateFinder):
        if is_a(callback, kind):
            raise ConfigurationError(
                f"{type(callback).__name__} is derived from {kind.__name__}, and may search within a run, in"
                f" Lightning's own loops. Instead, pass a {kind.__name__} itself, which searches before the fit."
            )


def refuse_finders(state: "RunState") -> None:
    """Check callbacks that were added since the constructor has checked them; remove finders, for later runs.

    Raises:
        ConfigurationError: If a callback has been added that is derived from a finder.
    """
    finders = [callback for callback in state.callbacks if is_finder(callback) and not is_stock_finder(callback)]
    if finders:
        state.callbacks = [callback for callback in state.callbacks if callback not in finders]
        _refuse_derived_finder(finders[0])
