"""History of learning curves: logged values by step, metrics by epoch."""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from equipoise.report.step_curve import StepCurve

__all__ = ["CurveHistory"]


class CurveHistory:
    """Collects curves for a callback, which calls a method here for each hook of the same name.

    By steps: what loggers are handed, every `log_every_n_steps`, with the learning rate of each scheduler, also if
    there is no logger. What loggers are not handed stands at the end of an epoch or a validation, as callbacks see it.
    So does everything under Lightning's Trainer.

    By epochs: training's values are those at an epoch's end, taken when nothing can change them any more; those that
    validation adds stand at the fraction of the epoch that was done. Reading the values waits for the device once an
    epoch.

    Attributes:
        curves: For every metric's name its values, by epochs done.
        validation_names: The metrics that validation adds.
    """

    def __init__(self) -> None:
        self.curves: dict[str, dict[float, float]] = {}
        self.validation_names: set[str] = set()
        self.batches_done = 0  # in this epoch
        self._by_step: dict[str, StepCurve] = {}
        self._epochs = StepCurve()  # the number of epochs done, at the last step of each
        self._handed: set[str] = set()  # the metrics that loggers were handed in this epoch
        self._names: dict[str, str] = {}  # under which a metric is recorded, by its name for loggers
        self._pending: tuple[int, int] | None = None  # the epoch that ended last and its last step, while values change
        self._names_before: frozenset[str] | None = None  # the metrics known before a validation

    # What is recorded.

    def step_curves(self) -> Mapping[str, Mapping[float, float]]:
        """Return for every metric's name its values by step, thinned where there are many."""
        curves: dict[str, dict[float, float]] = {}
        for name, curve in self._by_step.items():
            curves[name] = {}
            curves[name].update((float(step), value) for step, value in curve.points().items())
        return curves

    def epoch_ends(self) -> dict[int, int]:
        """Return the last step of each epoch, by epochs done; thinned where there are many."""
        return {int(epoch): step for step, epoch in self._epochs.points().items()}

    def state_dict(self) -> dict[str, Any]:
        """The curves so far."""
        return {
            "history": {name: dict(curve) for name, curve in self.curves.items()},
            "validation_names": sorted(self.validation_names),
            "by_step": {name: curve.state_dict() for name, curve in self._by_step.items()},
            "epochs": self._epochs.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on with the curves of an earlier process; checkpoints of earlier versions have none by steps."""
        self.curves = {name: dict(curve) for name, curve in state_dict["history"].items()}
        self.validation_names = set(state_dict["validation_names"])
        self._by_step = {}
        for name, state in state_dict.get("by_step", {}).items():
            self._by_step[name] = StepCurve()
            self._by_step[name].load_state_dict(state)
        self._epochs = StepCurve()
        if "epochs" in state_dict:
            self._epochs.load_state_dict(state_dict["epochs"])

    # When it is recorded.

    def on_fit_start(self, trainer: Any) -> None:
        """Forgets where an earlier fit was broken off, and begins to listen."""
        self._pending = None
        self._names_before = None
        self._handed.clear()
        self._names.clear()
        self.leave(trainer)
        listeners = getattr(trainer, "metric_listeners", None)
        if listeners is not None:
            listeners.append(self.hear)

    def leave(self, trainer: Any) -> None:
        """Listens no longer, if it did."""
        listeners = getattr(trainer, "metric_listeners", [])
        if self.hear in listeners:
            listeners.remove(self.hear)

    def on_train_start(self, trainer: Any) -> None:
        """Drops what an earlier fit recorded beyond the point where this one begins."""
        limit = trainer.current_epoch + 1 if trainer.global_step else 0
        self.curves = {
            name: {epoch: value for epoch, value in curve.items() if epoch <= limit}
            for name, curve in self.curves.items()
        }
        first = _steps_done(trainer)
        for curve in (self._epochs, *self._by_step.values()):
            curve.drop_from(first)

    def on_train_epoch_start(self, trainer: Any) -> None:
        """Takes the values of the epoch before."""
        self.take_epoch(trainer)
        self._pending = None
        self.batches_done = 0
        self._handed.clear()

    def hear(self, trainer: Any, metrics: Mapping[str, Any], step: int) -> None:
        """Records what loggers are handed, in the main process.

        Args:
            trainer: The trainer that hands them over.
            metrics: Numbers by name.
            step: The number of steps before the present one.
        """
        if not trainer.is_global_zero:
            return
        for name, value in metrics.items():
            recorded_name = self._name(trainer, name)
            self._handed.add(recorded_name)
            self._add(recorded_name, step, value)
        if trainer.training:
            for name, rate in _learning_rates(trainer).items():
                self._handed.add(name)
                self._add(name, step, rate)

    def on_validation_start(self, trainer: Any) -> None:
        """Notes which metrics are known: those that validation adds are its own."""
        if not trainer.sanity_checking:
            self._names_before = frozenset(trainer.callback_metrics)

    def on_validation_end(self, trainer: Any) -> None:
        """Takes the values of a validation."""
        if self._names_before is None or trainer.sanity_checking:
            return
        self.validation_names |= set(trainer.callback_metrics) - self._names_before
        self._names_before = None
        share = min(1.0, self.batches_done / trainer.num_training_batches)
        epoch = trainer.current_epoch + (share or 1.0)
        self._take(trainer, epoch, max(0, _steps_done(trainer) - 1), self.validation_names)

    def on_train_epoch_end(self, trainer: Any) -> None:
        """Notes that an epoch is over. Its values are taken later: the module may log more after this."""
        last = max(0, _steps_done(trainer) - 1)
        self._pending = (trainer.current_epoch, last)
        self._epochs.add(last, float(trainer.current_epoch + 1))

    def take_epoch(self, trainer: Any) -> None:
        """Takes the values of the epoch that has ended, as they are now."""
        if self._pending is not None:
            epoch, step = self._pending
            self._take(trainer, epoch + 1, step, set(trainer.callback_metrics) - self.validation_names)

    def on_exception(self, trainer: Any) -> None:
        """Takes what is there when a fit breaks off; with several processes what loggers were handed is all."""
        if trainer.world_size == 1:  # reading the values may need the others
            self.take_epoch(trainer)
            if self._pending is None and self.hear in getattr(trainer, "metric_listeners", ()):
                with contextlib.suppress(Exception):  # a device that failed cannot be read
                    trainer.hand_over_last_step()
        self.leave(trainer)

    def _take(self, trainer: Any, epoch: float, step: int, names: set[str]) -> None:
        metrics = trainer.callback_metrics
        for name, value in metrics.items():
            if name in names and not _is_fork(name, metrics):
                number = float(value)
                self.curves.setdefault(name, {})[float(epoch)] = number
                if name not in self._handed:
                    self._add(name, step, number)

    def _add(self, name: str, step: int, value: Any) -> None:
        if isinstance(value, (int, float)) and name != "epoch":
            self._by_step.setdefault(name, StepCurve()).add(step, float(value))

    def _name(self, trainer: Any, name: str) -> str:
        """Return the name under which a metric is recorded: `loss` for `loss_epoch` where callbacks see both."""
        known = self._names.get(name)
        if known is None:
            base, mark, loader = name.partition("/dataloader_idx_")
            known = name
            if base.endswith("_epoch") and _is_fork(name, trainer.callback_metrics):
                known = f"{base.removesuffix('_epoch')}{mark}{loader}"
            self._names[name] = known
        return known


def _steps_done(trainer: Any) -> int:
    """Return the number of steps done, as loggers count them; under Lightning's Trainer, those of all optimisers."""
    progress = getattr(trainer, "progress", None)
    if progress is None:
        return int(trainer.global_step)
    done = int(progress.batches_that_stepped)
    # The batch is counted when all that follows it is done.
    return done + 1 if trainer.validating else done


def _learning_rates(trainer: Any) -> dict[str, float]:
    """Return the rate of each scheduled optimiser's first group, under the name that Lightning gives it."""
    rates: dict[str, float] = {}
    for config in trainer.lr_scheduler_configs:
        optimizer = getattr(config.scheduler, "optimizer", None)
        groups = getattr(optimizer, "param_groups", None)
        if not groups:
            continue
        rate = groups[0].get("lr")
        if isinstance(rate, torch.Tensor) and rate.device.type == "cpu":
            rate = rate.item()
        if isinstance(rate, (int, float)):
            name = config.name or f"lr-{type(optimizer).__name__}"
            number = sum(1 for other in rates if other == name or other.startswith(f"{name}-"))
            rates[f"{name}-{number}" if number else name] = float(rate)
    return rates


def _is_fork(name: str, names: Any) -> bool:
    """Whether a name is `loss_step` or `loss_epoch` beside `loss`: the same value, under the names loggers get."""
    base, mark, loader = name.partition("/dataloader_idx_")
    root = base.removesuffix("_step").removesuffix("_epoch")
    return root != base and f"{root}{mark}{loader}" in names and f"{root}_epoch{mark}{loader}" in names
