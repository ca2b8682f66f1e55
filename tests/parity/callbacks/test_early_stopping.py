"""Lightning's EarlyStopping: when it stops a run, and with which reason."""

from typing import Any

from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint

from equipoise import ConfigurationError

from .. import data
from ..harness import Case, parity
from ..modules import Classifier


class Scripted(Classifier):
    """Logs given values, one for each validation and each training epoch."""

    values = (0.5, 0.4, 0.45, 0.46, 0.47, 0.3, 0.2, 0.1)

    def __init__(self) -> None:
        super().__init__()
        self.validations = 0

    def on_validation_epoch_end(self) -> None:
        self.log("value", self.values[min(self.validations, 7)])
        self.validations += not self.trainer.sanity_checking

    def on_train_epoch_end(self) -> None:
        self.log("train_value", self.values[self.current_epoch])


class NotANumber(Scripted):
    values = (0.5, 0.4, float("nan"), 0.3, 0.2, 0.1, 0.0, 0.0)


def stopping(monitor: str = "value", **options: Any) -> Any:
    return lambda: [EarlyStopping(monitor, **options)]


def state(trainer: Any) -> Any:
    callback = trainer.early_stopping_callback
    return {name: getattr(callback, name) for name in ("wait_count", "stopped_epoch", "best_score", "patience")}


def together() -> list[Any]:
    return [EarlyStopping("value", patience=1), ModelCheckpoint(monitor="value", save_top_k=2), LearningRateMonitor()]


def case(name: str, callbacks: Any, module: Any = Scripted, epochs: int | None = None, **options: Any) -> Case:
    """A case that must end after the given number of epochs."""
    options = {"max_epochs": 8, "limit_train_batches": 3, "num_sanity_val_steps": 0, **options}
    proves = None if epochs is None else lambda r: r["counters"]["current_epoch"] == epochs
    return Case(name=name, module=module, callbacks=callbacks, options=options, observe=state, proves=proves)


CASES = [
    case("patience-one", stopping(patience=1), epochs=3),
    case("not-finite", stopping(patience=9), NotANumber, epochs=3),
    case("training-value", stopping("train_value", patience=1), epochs=3),
    case("on-training-epoch-end", stopping("train_value", patience=1, check_on_train_epoch_end=True), epochs=3),
    case("with-interval", stopping(patience=1), val_check_interval=1),
    case("min-epochs", stopping(patience=1), epochs=5, min_epochs=5),
    case("missing-value-not-strict", stopping("nowhere", strict=False), epochs=8),
    case("with-checkpoints-and-rates", together, epochs=3),
    Case(
        name="missing-value-strict",
        callbacks=stopping("nowhere"),
        raises=RuntimeError,
        refuses=ConfigurationError,
    ),
    Case(
        name="without-validation",
        module=Classifier,
        data=lambda: {"train_dataloaders": data.loader(3)},
        callbacks=stopping("train_loss_epoch", patience=1, mode="max"),
        options={"max_epochs": 6},
        observe=state,
        proves=lambda r: r["counters"]["current_epoch"] == 2,
    ),
]

test_parity = parity(CASES)
