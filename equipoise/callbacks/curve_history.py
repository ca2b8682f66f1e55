"""Learning curves as they come: the metrics of epochs and validations, by epochs done."""

from collections.abc import Mapping
from typing import Any

__all__ = ["CurveHistory"]


class CurveHistory:
    """Collects curves for a callback, which calls a method here for each hook of the same name.

    Training's values are those at an epoch's end, taken when nothing can change them any more; those that validation
    adds stand at the fraction of the epoch that was done. Reading the values waits for the device once an epoch.

    Attributes:
        curves: For every metric's name its values, by epochs done.
        validation_names: The metrics that validation adds.
    """

    def __init__(self) -> None:
        self.curves: dict[str, dict[float, float]] = {}
        self.validation_names: set[str] = set()
        self.batches_done = 0  # in this epoch
        self._pending: int | None = None  # the epoch that ended last, while its values may still change
        self._names_before: frozenset[str] | None = None  # the metrics known before a validation

    def state_dict(self) -> dict[str, Any]:
        """The curves so far."""
        history = {name: dict(curve) for name, curve in self.curves.items()}
        return {"history": history, "validation_names": sorted(self.validation_names)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on with the curves of an earlier process."""
        self.curves = {name: dict(curve) for name, curve in state_dict["history"].items()}
        self.validation_names = set(state_dict["validation_names"])

    def on_fit_start(self) -> None:
        """Forgets where an earlier fit was broken off."""
        self._pending = self._names_before = None

    def on_train_start(self, trainer: Any) -> None:
        """Drops what an earlier fit recorded beyond the point where this one begins."""
        limit = trainer.current_epoch + 1 if trainer.global_step else 0
        self.curves = {
            name: {epoch: value for epoch, value in curve.items() if epoch <= limit}
            for name, curve in self.curves.items()
        }

    def on_train_epoch_start(self, trainer: Any) -> None:
        """Takes the values of the epoch before."""
        self.take_epoch(trainer)
        self._pending, self.batches_done = None, 0

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
        self._take(trainer, trainer.current_epoch + (share or 1.0), self.validation_names)

    def on_train_epoch_end(self, trainer: Any) -> None:
        """Notes that an epoch is over. Its values are taken later: the module may log more after this."""
        self._pending = trainer.current_epoch

    def take_epoch(self, trainer: Any) -> None:
        """Takes the values of the epoch that has ended, as they are now."""
        if self._pending is not None:
            self._take(trainer, self._pending + 1, set(trainer.callback_metrics) - self.validation_names)

    def _take(self, trainer: Any, epoch: float, names: set[str]) -> None:
        metrics = trainer.callback_metrics
        for name, value in metrics.items():
            if name in names and not _is_fork(name, metrics):
                self.curves.setdefault(name, {})[float(epoch)] = float(value)


def _is_fork(name: str, names: Any) -> bool:
    """Whether a name is `loss_step` or `loss_epoch` beside `loss`: the same value, under the names loggers get."""
    base, mark, loader = name.partition("/dataloader_idx_")
    root = base.removesuffix("_step").removesuffix("_epoch")
    return root != base and f"{root}{mark}{loader}" in names and f"{root}_epoch{mark}{loader}" in names
