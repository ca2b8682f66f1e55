"""Values that callbacks and schedulers monitor, and that nobody logs, such as "val_loss" for "val/loss".

After the sanity check the names of a validation are known, but training may log others. So a name is refused there only
if it differs from one of them by its separators, by capitals or by what looks like a slip. After the first epoch, when
early stopping looks, a missing value is certain.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from equipoise.errors import ConfigurationRuntimeError
from equipoise.interop.lightning.callbacks import looks_after_training_epochs
from equipoise.interop.lightning.classes import is_stock
from equipoise.parallel.communication.processes import Processes
from equipoise.trainer.logging.logs import Logs
from equipoise.trainer.state.run_state import RunState

__all__ = ["check_monitors", "check_monitors_of_validation", "nothing_to_monitor"]

# How near a name is that was rather mistyped than meant: "val_los", but not "val_auc" for "val_acc".
_SLIP = 0.9


def check_monitors_of_validation(
    state: RunState, module: LightningModule, processes: Processes, logs: Logs, names: set[str]
) -> None:
    """Compare monitored names with those that the sanity check has logged; called in all processes together.

    Args:
        state: Contains the callbacks and the schedulers.
        module: The user's module.
        processes: The processes of the run.
        logs: The logged values.
        names: Names that this process has logged, of all loaders.

    Raises:
        ConfigurationError: If one differs from a logged name by separators, capitals or a slip; also a RuntimeError.
    """
    here = sorted(names.union(logs.callback_metrics))
    logged = processes.broadcast(here)
    for owner, name in _monitored(state, module):
        if name in logged:
            continue
        near = _nearest(name, logged)
        if near is not None:
            raise ConfigurationRuntimeError(
                f"{owner} monitors {name!r}, which the validation has not logged; did you mean {near!r}? If"
                f" something logs {name!r} later, leave out the sanity check: num_sanity_val_steps=0."
            )


def _nearest(name: str, logged: Sequence[str]) -> str | None:
    """Return the name that was probably meant, of the same letters or mistyped; None if there is none."""
    for other in logged:
        if _letters_of(other) == _letters_of(name):
            return other
    for other in get_close_matches(name, logged, n=1, cutoff=_SLIP):
        # `train_loss` is no slip of `rain_loss`, and `loss_2` none of `loss_1`: others may well be meant.
        if other[0] == name[0] and re.findall(r"\d", other) == re.findall(r"\d", name):
            return other
    return None


def _monitored(state: RunState, module: LightningModule) -> Iterator[tuple[str, str]]:
    """Yield the names that must be logged, each with the class that monitors it."""
    for callback in state.callbacks:
        for kind in (EarlyStopping, ModelCheckpoint):
            # A derived class may find its value elsewhere.
            if is_stock(callback, kind):
                must_exist = callback.strict if kind is EarlyStopping else callback.save_top_k != 0
                if must_exist and callback.monitor not in (None, "epoch", "step"):
                    yield type(callback).__name__, callback.monitor
    if module.automatic_optimization:
        for config in state.lr_scheduler_configs:
            if config.reduce_on_plateau and config.strict and config.monitor:
                yield type(config.scheduler).__name__, config.monitor


def check_monitors(state: RunState, logs: Logs, *, validates: bool, has_validated: bool) -> None:
    """Check that what early stopping monitors has been logged; called with the first values of an epoch.

    A class derived from Lightning's may look later than that, and one that looks after validations does not look in a
    run without any.

    Args:
        state: Contains the callbacks.
        logs: The logged values.
        validates: Whether the fit validates.
        has_validated: Whether a validation of this fit has begun, after the sanity check.

    Raises:
        ConfigurationError: Naming what was logged; also a RuntimeError, as in Lightning.
    """
    if validates and not has_validated:
        return
    # Early stopping does not look, and a program in development may log less.
    if state.fast_dev_run:
        return
    for callback in state.callbacks:
        # A derived class may look at other times.
        if not is_stock(callback, EarlyStopping):
            continue
        if not validates and not looks_after_training_epochs(callback):
            continue
        # The values are read only here, since that computes metrics.
        logged = sorted(map(str, logs.callback_metrics))
        if callback.strict and callback.monitor not in logged:
            raise nothing_to_monitor(type(callback).__name__, callback.monitor, logged)


def nothing_to_monitor(owner: str, name: str | None, logged: Iterable[str]) -> ConfigurationRuntimeError:
    """Return the error about a monitored value that was not logged; it names the nearest one.

    Args:
        owner: The class that monitors it.
        name: Its name.
        logged: The names of logged values.
    """
    names = sorted(map(str, logged))
    near = [other for other in names if _letters_of(other) == _letters_of(str(name))]
    near += get_close_matches(str(name), names, n=1)
    hint = f"; there are: {', '.join(names) or 'none'}."
    if near:
        hint = f"; did you mean {near[0]!r}?"
    return ConfigurationRuntimeError(f"{owner} monitors {name!r}, but no such value was logged{hint}")


def _letters_of(name: str) -> str:
    """Return a name without separators, capitals and the number of a loader, in which mistyped names often differ."""
    return re.sub(r"/dataloader_idx_\d+$|[\W_]", "", name).lower()
