"""History of learning curves: logged values by step, metrics by epoch."""

import contextlib
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch

from equipoise.extensions.common.page.scales import thin

__all__ = ["CurveHistory", "StepCurve", "step_counts", "steps_done"]

_MOST_POINTS = 1024
# Three points of each interval stay, and both ends.
_THINNED = 3 * 256 + 2

# Values by steps, or by epochs done.
Curve = dict[float, float]


class StepCurve:
    """Values by steps, thinned whenever there are more than 1024.

    Args:
        state: The points of an earlier process, as `state_dict` returns them. Default: none.

    Example:
        >>> curve = StepCurve()
        >>> for step in range(100_000):
        ...     curve.add(step, 1.0 if step == 617 else 0.0)
        >>> len(curve.points()) <= 1024, curve.points()[617]
        (True, 1.0)
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self._points: Curve = {}
        if state is not None:
            self._points = dict(zip(state["steps"], state["values"], strict=True))

    def add(self, step: int, value: float) -> None:
        """Add a value.

        Args:
            step: Its step. It replaces an earlier value of this step.
            value: The value; it may be infinite or no number.
        """
        self._points[step] = value
        if len(self._points) > _MOST_POINTS:
            points = list(self.points().items())
            self._points = dict(thin(points, _THINNED))

    def points(self) -> Curve:
        """Return the values by step, in the order of steps."""
        return dict(sorted(self._points.items()))

    def drop_from(self, step: int) -> None:
        """Forget the values of a step and later ones."""
        dropped = [known for known in self._points if known >= step]
        for later in dropped:
            del self._points[later]

    def state_dict(self) -> dict[str, Any]:
        """Return the points."""
        points = self.points()
        return {"steps": list(points), "values": list(points.values())}


class CurveHistory:
    """Collects curves for a callback, which calls a method here for each hook of the same name.

    By steps: the values that loggers receive, every `log_every_n_steps`, with the learning rate of each scheduler, also
    without a logger. Other values are recorded at the end of an epoch or a validation, as callbacks see them. Under
    Lightning's Trainer this holds for all values.

    By epochs: training's values are those at an epoch's end, read when nothing can change them any more; those of
    validation are recorded at the finished fraction of the epoch. Reading waits for the device once an epoch.

    Attributes:
        curves: For every metric's name its values, by epochs done.
        validation_names: Names of the metrics that validation adds.
        batches_done: Number of batches done in the present epoch.
        observer: Function that receives the step, and values by name, when they are recorded by step. Default: None.
    """

    def __init__(self) -> None:
        self.observer: Callable[[int, Mapping[str, float]], None] | None = None
        # Values that the observer has not received yet.
        self._unobserved: dict[str, float] = {}
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

    def __getstate__(self) -> dict[str, Any]:
        """Return the curves, without the observer of a run."""
        return {**vars(self), "observer": None}

    # Recorded curves.

    def step_curves(self) -> Mapping[str, Curve]:
        """Return for every metric's name its values by step, thinned if there are many."""
        return {name: curve.points() for name, curve in self._by_step.items()}

    def last_values(self) -> dict[str, float]:
        """Return the last value of each metric: the end of the curve that a report draws."""
        values = {}
        for name, curve in self.curves.items():
            points = curve
            if name in self._by_step:
                points = self._by_step[name].points()
            if points:
                values[name] = points[max(points)]
        return values

    def epoch_ends(self) -> dict[int, int]:
        """Return the last step of each epoch, by epochs done; thinned if there are many."""
        return {int(epoch): int(step) for step, epoch in self._epochs.points().items()}

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
        self.curves = {name: dict(curve) for name, curve in state_dict["history"].items()}
        self.validation_names = set(state_dict["validation_names"])
        # Checkpoints of earlier versions have no curves by steps.
        self._by_step = {name: StepCurve(state) for name, state in state_dict.get("by_step", {}).items()}
        self._epochs = StepCurve(state_dict.get("epochs"))

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
        """Stop receiving values and handing them on; may be called twice."""
        self.observer = None
        listeners = getattr(trainer, "metric_listeners", [])
        if self.hear in listeners:
            listeners.remove(self.hear)

    def on_train_start(self, trainer: Any) -> None:
        """Drop values that an earlier fit recorded beyond the point where this one begins."""
        last_epoch = 0
        if trainer.global_step:
            last_epoch = trainer.current_epoch + 1
        for name, curve in self.curves.items():
            self.curves[name] = {epoch: value for epoch, value in curve.items() if epoch <= last_epoch}
        first_step = steps_done(trainer)
        for step_curve in (self._epochs, *self._by_step.values()):
            step_curve.drop_from(first_step)
        # In a resumed epoch, loggers have received values of these.
        epoch_before = max(self._epochs.points(), default=-1)
        for name, step_curve in self._by_step.items():
            if name not in self.validation_names and max(step_curve.points(), default=-1) > epoch_before:
                self._logged_names.add(name)

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
        if trainer.training:
            rates = _learning_rates(trainer)
            for name, rate in rates.items():
                self._logged_names.add(name)
                self._add(name, step, rate)
        self._hand_on(step)

    def on_validation_start(self, trainer: Any) -> None:
        """Note the present metrics, to recognise those that validation adds. It is no sanity check."""
        self._names_before = frozenset(trainer.callback_metrics)

    def on_validation_end(self, trainer: Any) -> None:
        """Record the values of a validation."""
        if self._names_before is None:
            return
        self.validation_names |= set(trainer.callback_metrics) - self._names_before
        self._names_before = None
        # Before the first batch, the validation belongs to the end of an epoch.
        share = min(1.0, self.batches_done / trainer.num_training_batches)
        if share == 0:
            share = 1.0
        self._record(trainer, trainer.current_epoch + share, _last_step(trainer), self.validation_names)

    def on_train_epoch_end(self, trainer: Any) -> None:
        """Note the end of an epoch. Its values are read later: the module may log more after this."""
        last_step = _last_step(trainer)
        self._pending = (trainer.current_epoch, last_step)
        self._epochs.add(last_step, float(trainer.current_epoch + 1))

    def take_epoch(self, trainer: Any, *, is_last: bool = False) -> None:
        """Record the present values of the epoch that ended last.

        Args:
            trainer: The trainer.
            is_last: Whether the fit ends with it: curves of steps end with the last step then, even if loggers did not
                receive its values. Default: False.
        """
        if self._pending is None:
            return
        epoch, last_step = self._pending
        names = set(trainer.callback_metrics) - self.validation_names
        if is_last:
            for name, curve in self._by_step.items():
                if last_step not in curve.points():
                    self._logged_names.discard(name)
        self._record(trainer, epoch + 1, last_step, names)

    def on_exception(self, trainer: Any) -> None:
        """Record the last values of a fit that fails, if there is a single process."""
        # Reading the values of several processes may need the other ones.
        if trainer.world_size == 1:
            self.take_epoch(trainer)
            listeners = getattr(trainer, "metric_listeners", ())
            if self._pending is None and self.hear in listeners:
                # A device that failed cannot be read.
                with contextlib.suppress(Exception):
                    trainer.hand_over_last_step()
        self.leave(trainer)

    def _record(self, trainer: Any, epoch: float, step: int, names: set[str]) -> None:
        """Record the present values of some metrics by epoch, and by step those that loggers did not receive."""
        metrics = trainer.callback_metrics
        for name, value in metrics.items():
            if name not in names or _is_fork(name, metrics):
                continue
            # Reading the number waits for the device.
            number = float(value)
            self.curves.setdefault(name, {})[float(epoch)] = number
            if name not in self._logged_names:
                self._add(name, step, number)
        self._hand_on(step)

    def _add(self, name: str, step: int, value: Any) -> None:
        # Loggers receive the number of the epoch with all other values.
        if name != "epoch" and isinstance(value, (int, float)):
            curve = self._by_step.setdefault(name, StepCurve())
            number = float(value)
            curve.add(step, number)
            self._unobserved[name] = number

    def _hand_on(self, step: int) -> None:
        """Let the observer receive the values of a step."""
        values = self._unobserved
        self._unobserved = {}
        if values and self.observer is not None:
            self.observer(step, values)

    def _recorded_name(self, trainer: Any, name: str) -> str:
        """Return the name under which a metric is recorded: `loss` for `loss_epoch` if callbacks see both."""
        if name not in self._recorded_names:
            recorded_name = name
            base, mark, loader = name.partition("/dataloader_idx_")
            if base.endswith("_epoch") and _is_fork(name, trainer.callback_metrics):
                root = base.removesuffix("_epoch")
                recorded_name = f"{root}{mark}{loader}"
            self._recorded_names[name] = recorded_name
        return self._recorded_names[name]


def steps_done(trainer: Any) -> int:
    """Return the number of steps done, as loggers count them; under Lightning's Trainer, those of all optimisers."""
    progress = getattr(trainer, "progress", None)
    if progress is None:
        return int(trainer.global_step)
    steps = int(progress.batches_that_stepped)
    # The trainer counts a batch after the validation that follows it.
    if trainer.validating:
        steps += 1
    return steps


def step_counts(trainer: Any) -> dict[str, int]:
    """Return the steps done, by what they are; those of optimisers apart where several step in turn."""
    counts = {"steps": steps_done(trainer)}
    # A fit may end between a step and its count.
    if abs(trainer.global_step - counts["steps"]) > 1:
        # `max_steps` counts these.
        counts["optimiser steps"] = int(trainer.global_step)
    return counts


def _last_step(trainer: Any) -> int:
    """Return the number of the last step, from 0; 0 also before the first."""
    return max(0, steps_done(trainer) - 1)


def _learning_rates(trainer: Any) -> dict[str, float]:
    """Return the rate of each scheduled optimiser's first group, under the name that Lightning gives it."""
    rates: dict[str, float] = {}
    for config in trainer.lr_scheduler_configs:
        optimizer = getattr(config.scheduler, "optimizer", None)
        rate = _learning_rate(optimizer)
        if rate is None:
            continue
        name = config.name or f"lr-{type(optimizer).__name__}"
        # Optimisers of one class are numbered.
        numbered = f"{name}-"
        earlier = [other for other in rates if other == name or other.startswith(numbered)]
        if earlier:
            name = f"{name}-{len(earlier)}"
        rates[name] = rate
    return rates


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
    root = base.removesuffix("_step").removesuffix("_epoch")
    if root == base:
        return False
    suffix = f"{mark}{loader}"
    return f"{root}{suffix}" in names and f"{root}_epoch{suffix}" in names
