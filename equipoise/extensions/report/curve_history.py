"""History of learning curves: logged values by step, metrics by epoch."""

import contextlib
from collections.abc import Container, Mapping
from typing import Any

import torch

from equipoise.extensions.report.step_curve import StepCurve

__all__ = ["CurveHistory"]

# Values by steps, or by epochs done.
Curve = dict[float, float]


class CurveHistory:
    """Collects curves for a callback, which calls a method here for each hook of the same name.

    By steps: the values that loggers receive, every `log_every_n_steps`, with the learning rate of each scheduler, also
    without a logger. Other values stand at the end of an epoch or a validation, as callbacks see them. Under
    Lightning's Trainer all values do.

    By epochs: training's values are those at an epoch's end, read when nothing can change them any more; those of
    validation stand at the finished fraction of the epoch. Reading the values waits for the device once an epoch.

    Attributes:
        curves: For every metric's name its values, by epochs done.
        validation_names: Names of the metrics that validation adds.
        batches_done: Number of batches done in the present epoch.
    """

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.validation_names: set[str] = set()
        self.batches_done = 0
        self._by_step: dict[str, StepCurve] = {}
        # The number of epochs done, at the last step of each.
        self._epochs = StepCurve()
        # Metrics that loggers received in this epoch.
        self._logged_names: set[str] = set()
        # Name under which a metric is recorded, by its name for loggers.
        self._recorded_names: dict[str, str] = {}
        # The epoch that ended last and its last step, while its values may still change.
        self._pending: tuple[int, int] | None = None
        # Metrics that existed before the present validation.
        self._names_before: frozenset[str] | None = None

    # Recorded curves.

    def step_curves(self) -> Mapping[str, Mapping[float, float]]:
        """Return for every metric's name its values by step, thinned if there are many."""
        curves: dict[str, Curve] = {}
        for name, step_curve in self._by_step.items():
            points = step_curve.points()
            curves[name] = {float(step): value for step, value in points.items()}
        return curves

    def epoch_ends(self) -> dict[int, int]:
        """Return the last step of each epoch, by epochs done; thinned if there are many."""
        ends = {}
        points = self._epochs.points()
        for step, epoch in points.items():
            number = int(epoch)
            ends[number] = step
        return ends

    def state_dict(self) -> dict[str, Any]:
        """Return the curves so far."""
        history = {name: dict(curve) for name, curve in self.curves.items()}
        by_step = {name: curve.state_dict() for name, curve in self._by_step.items()}
        return {
            "history": history,
            "validation_names": sorted(self.validation_names),
            "by_step": by_step,
            "epochs": self._epochs.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the curves of an earlier process."""
        # 1. Curves by epochs.
        self.curves = {}
        history = state_dict["history"]
        for name, curve in history.items():
            self.curves[name] = dict(curve)
        names = state_dict["validation_names"]
        self.validation_names = set(names)
        # 2. Curves by steps, which checkpoints of earlier versions do not have.
        self._by_step = {}
        by_step = state_dict.get("by_step", {})
        for name, state in by_step.items():
            step_curve = StepCurve()
            step_curve.load_state_dict(state)
            self._by_step[name] = step_curve
        # 3. The ends of the epochs.
        self._epochs = StepCurve()
        if "epochs" in state_dict:
            self._epochs.load_state_dict(state_dict["epochs"])

    # Hooks.

    def on_fit_start(self, trainer: Any) -> None:
        """Forget the state of an interrupted fit, and begin to receive the values that loggers receive."""
        self._pending = None
        self._names_before = None
        self._logged_names.clear()
        self._recorded_names.clear()
        self.leave(trainer)
        # Lightning's Trainer has no listeners.
        listeners = getattr(trainer, "metric_listeners", None)
        if listeners is not None:
            listeners.append(self.hear)

    def leave(self, trainer: Any) -> None:
        """Stop receiving values; may be called twice."""
        listeners = getattr(trainer, "metric_listeners", [])
        if self.hear in listeners:
            listeners.remove(self.hear)

    def on_train_start(self, trainer: Any) -> None:
        """Drop values that an earlier fit recorded beyond the point where this one begins."""
        last_epoch = 0
        if trainer.global_step:
            last_epoch = trainer.current_epoch + 1
        earlier_curves = {}
        for name, curve in self.curves.items():
            earlier_curves[name] = _up_to(last_epoch, curve)
        self.curves = earlier_curves
        first_step = _steps_done(trainer)
        for step_curve in (self._epochs, *self._by_step.values()):
            step_curve.drop_from(first_step)

    def on_train_epoch_start(self, trainer: Any) -> None:
        """Record the values of the epoch before."""
        self.take_epoch(trainer)
        self._pending = None
        self.batches_done = 0
        self._logged_names.clear()

    def hear(self, trainer: Any, metrics: Mapping[str, Any], step: int) -> None:
        """Record the values that loggers receive, in the main process.

        Args:
            trainer: The trainer that logs them.
            metrics: Numbers by name.
            step: The number of steps before the present one.
        """
        if not trainer.is_global_zero:
            return
        for name, value in metrics.items():
            recorded_name = self._recorded_name(trainer, name)
            self._logged_names.add(recorded_name)
            self._add(recorded_name, step, value)
        if not trainer.training:
            return
        rates = _learning_rates(trainer)
        for name, rate in rates.items():
            self._logged_names.add(name)
            self._add(name, step, rate)

    def on_validation_start(self, trainer: Any) -> None:
        """Note the present metrics, to recognise those that validation adds."""
        if not trainer.sanity_checking:
            self._names_before = frozenset(trainer.callback_metrics)

    def on_validation_end(self, trainer: Any) -> None:
        """Record the values of a validation."""
        if self._names_before is None:
            return
        if trainer.sanity_checking:
            return
        names = set(trainer.callback_metrics)
        self.validation_names |= names - self._names_before
        self._names_before = None
        # Before the first batch, the validation belongs to the end of an epoch.
        share = self.batches_done / trainer.num_training_batches
        share = min(1.0, share) or 1.0
        epoch = trainer.current_epoch + share
        self._record(
            trainer,
            epoch,
            _last_step(trainer),
            self.validation_names,
        )

    def on_train_epoch_end(self, trainer: Any) -> None:
        """Note the end of an epoch. Its values are read later: the module may log more after this."""
        epoch = trainer.current_epoch
        last_step = _last_step(trainer)
        self._pending = (epoch, last_step)
        epochs_done = float(epoch + 1)
        self._epochs.add(last_step, epochs_done)

    def take_epoch(self, trainer: Any) -> None:
        """Record the present values of the epoch that ended last."""
        if self._pending is None:
            return
        epoch, last_step = self._pending
        epochs_done = epoch + 1
        names = set(trainer.callback_metrics)
        names -= self.validation_names
        self._record(
            trainer,
            epochs_done,
            last_step,
            names,
        )

    def on_exception(self, trainer: Any) -> None:
        """Record the last values of a fit that fails, if there is a single process."""
        # Reading the values of several processes may need the other ones.
        if trainer.world_size == 1:
            self.take_epoch(trainer)
            listeners = getattr(trainer, "metric_listeners", ())
            is_listening = self.hear in listeners
            if self._pending is None and is_listening:
                # A device that failed cannot be read.
                with contextlib.suppress(Exception):
                    trainer.hand_over_last_step()
        self.leave(trainer)

    def _record(
        self,
        trainer: Any,
        epoch: float,
        step: int,
        names: set[str],
    ) -> None:
        """Record the present values of some metrics by epoch, and by step those that loggers did not receive."""
        metrics = trainer.callback_metrics
        for name, value in metrics.items():
            if name not in names or _is_fork(name, metrics):
                continue
            # Reading the number waits for the device.
            number = float(value)
            curve = self.curves.setdefault(name, {})
            curve[float(epoch)] = number
            if name not in self._logged_names:
                self._add(name, step, number)

    def _add(self, name: str, step: int, value: Any) -> None:
        # Loggers receive the number of the epoch with all other values.
        if name == "epoch":
            return
        if not isinstance(value, (int, float)):
            return
        number = float(value)
        step_curve = self._by_step.setdefault(name, StepCurve())
        step_curve.add(step, number)

    def _recorded_name(self, trainer: Any, name: str) -> str:
        """Return the name under which a metric is recorded: `loss` for `loss_epoch` if callbacks see both."""
        recorded_name = self._recorded_names.get(name)
        if recorded_name is not None:
            return recorded_name
        recorded_name = name
        base, mark, loader = name.partition("/dataloader_idx_")
        if base.endswith("_epoch") and _is_fork(name, trainer.callback_metrics):
            root = base.removesuffix("_epoch")
            recorded_name = f"{root}{mark}{loader}"
        self._recorded_names[name] = recorded_name
        return recorded_name


def _up_to(last_epoch: float, curve: Curve) -> Curve:
    """Return the values of a curve up to an epoch."""
    values = {}
    for epoch, value in curve.items():
        if epoch <= last_epoch:
            values[epoch] = value
    return values


def _steps_done(trainer: Any) -> int:
    """Return the number of steps done, as loggers count them; under Lightning's Trainer, those of all optimisers."""
    progress = getattr(trainer, "progress", None)
    if progress is None:
        return int(trainer.global_step)
    steps = int(progress.batches_that_stepped)
    # The trainer counts a batch after the validation that follows it.
    if trainer.validating:
        steps += 1
    return steps


def _last_step(trainer: Any) -> int:
    """Return the number of the last step, from 0; 0 also before the first."""
    last_step = _steps_done(trainer) - 1
    return max(0, last_step)


def _learning_rates(trainer: Any) -> dict[str, float]:
    """Return the rate of each scheduled optimiser's first group, under the name that Lightning gives it."""
    rates: dict[str, float] = {}
    for config in trainer.lr_scheduler_configs:
        optimizer = getattr(config.scheduler, "optimizer", None)
        rate = _learning_rate(optimizer)
        if rate is None:
            continue
        kind = type(optimizer)
        name = config.name or f"lr-{kind.__name__}"
        # Optimisers of one class are numbered.
        earlier = _count_of_class(name, rates)
        if earlier:
            name = f"{name}-{earlier}"
        rates[name] = rate
    return rates


def _count_of_class(name: str, rates: Mapping[str, float]) -> int:
    """Count the names that are `name`, with a number or without."""
    numbered = f"{name}-"
    count = 0
    for earlier in rates:
        if earlier == name or earlier.startswith(numbered):
            count += 1
    return count


def _learning_rate(optimizer: Any) -> float | None:
    """Return the rate of an optimiser's first group; None if there is none, or if reading it waits for a device."""
    groups = getattr(optimizer, "param_groups", None)
    if not groups:
        return None
    rate = groups[0].get("lr")
    if isinstance(rate, torch.Tensor) and rate.device.type == "cpu":
        rate = rate.item()
    if isinstance(rate, (int, float)):
        return float(rate)
    return None


def _is_fork(name: str, names: Container[str]) -> bool:
    """Return True if a name is `loss_step` or `loss_epoch` beside `loss`: the same value, under names for loggers."""
    base, mark, loader = name.partition("/dataloader_idx_")
    root = base.removesuffix("_step")
    root = root.removesuffix("_epoch")
    if root == base:
        return False
    suffix = f"{mark}{loader}"
    if f"{root}{suffix}" not in names:
        return False
    return f"{root}_epoch{suffix}" in names
