"""OptunaPruning: a trial of Optuna ends after a validation from which the study expects nothing."""

from collections.abc import Mapping
from functools import partial
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

from lightning.pytorch.trainer.states import TrainerFn

from equipoise.callbacks.callback import Callback
from equipoise.errors import ConfigurationError, StepError
from equipoise.parallel.workers.worker_main import call_in_parent

__all__ = ["OptunaPruning"]

# The trials of this process, which stay here: copies of a callback in other processes ask by the key.
_trials: WeakValueDictionary[str, Any] = WeakValueDictionary()


def _prunes(key: str, value: float, step: int) -> bool:
    """Report a value to a trial of this process; return whether it should be pruned."""
    trial = _trials.get(key)
    if trial is None:
        raise ConfigurationError("OptunaPruning needs the trial in the process of rank 0, which has None.")
    trial.report(value, step)
    return bool(trial.should_prune())


class OptunaPruning(Callback):
    """Report a logged value to a trial of Optuna after each validation, and prune the trial if its study says so.

    The process that called `fit` asks the study, also where the strategy computes in processes of its own. Rank 0
    decides by its value; then all processes end after the same validation, and `fit` raises `optuna.TrialPruned`, which
    `study.optimize` expects. Values are numbered from 0 by the validations of the fit, the sanity check left out; a fit
    that continues from a checkpoint continues to count.

    Args:
        trial: The trial. In processes that torchrun or Slurm has started, that of rank 0; others may give None.
        monitor: The name of the logged value. Default: "val_loss".

    Raises:
        ConfigurationError: If the trial is none, or Optuna is not installed.
        StepError: From `fit`, if the value was not logged.

    Example:
        >>> from equipoise import OptunaPruning, Trainer
        >>> def objective(trial):
        ...     module = Net(lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True))
        ...     trainer = Trainer(max_epochs=20, callbacks=[OptunaPruning(trial, monitor="val_loss")])
        ...     trainer.fit(module, train_loader, val_loader)
        ...     return trainer.callback_metrics["val_loss"].item()
        >>> optuna.create_study().optimize(objective, n_trials=100)  # doctest: +SKIP
    """

    # That of copies.
    trial: Any = None

    def __init__(self, trial: Any, monitor: str = "val_loss") -> None:
        if trial is not None and not all(callable(getattr(trial, name, None)) for name in ("report", "should_prune")):
            raise ConfigurationError(f"trial is a trial of Optuna, as an objective receives it, not {trial!r}.")
        _pruned()
        self.trial = trial
        self.monitor = monitor
        # The number of the next value.
        self.step = 0
        self._key = uuid4().hex
        if trial is not None:
            _trials[self._key] = trial

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the trial, which belongs to one process."""
        return {name: value for name, value in vars(self).items() if name != "trial"}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Count from 0 in each fit; a checkpoint is loaded afterwards."""
        if stage == TrainerFn.FITTING:
            self.step = 0

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Report the value, and end the fit in all processes if the trial is pruned."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        values = trainer.callback_metrics
        if self.monitor not in values:
            names = ", ".join(values) or "none"
            raise StepError(
                f"OptunaPruning reports {self.monitor!r}, which was not logged: there are {names}. Log it in"
                " validation_step, or name another value as monitor."
            )
        reason = ""
        if trainer.is_global_zero:
            value = float(values[self.monitor])
            ask = partial(_prunes, self._key, value, self.step)
            if ask() if self._key in _trials else call_in_parent(ask):
                reason = f"Pruned after {self.step + 1} validations, at {self.monitor}={value}."
        self.step += 1
        reason = trainer.strategy.broadcast(reason)
        if reason:
            raise _pruned()(reason)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the next value."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the number of the next value."""
        self.step = state_dict["step"]


def _pruned() -> type[Exception]:
    """Return the error of a trial that is pruned.

    Raises:
        ConfigurationError: If Optuna is not installed.
    """
    try:
        from optuna import TrialPruned
    except ModuleNotFoundError as error:
        raise ConfigurationError("OptunaPruning needs optuna, which is not installed: pip install optuna.") from error
    return TrialPruned  # type: ignore[no-any-return]
