"""Learning-rate schedulers that watch a value or end with a run; `tests/trainer/optimization` has when others step."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    ReduceLROnPlateau,
    StepLR,
)

from equipoise import ConfigurationError

from .. import data
from ..harness import Case, Record, parity
from ..modules import Classifier, with_optimizers


def schedule(make: Callable[[SGD], Any], base: type[Any] = Classifier, **config: Any) -> Callable[[], Any]:
    """A module with one scheduler and the options of its dictionary."""

    def configure(module: Any) -> Any:
        optimizer = SGD(module.parameters(), 0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **config}}

    return with_optimizers(configure, base)


def halve(optimizer: SGD) -> StepLR:
    return StepLR(optimizer, 1, 0.5)


def plateau(optimizer: SGD) -> ReduceLROnPlateau:
    """Lowers the rate at every call after the first, whatever the value."""
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e6, threshold_mode="abs")


def rate(record: Record) -> float:
    return float(record["optimizers"][0]["param_groups"][0]["lr"])


class SteppedWithMetric(Classifier):
    """Gives the monitored value, halved, to a plateau scheduler."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(metric / 2)


def two_schedulers(module: Any) -> Any:
    optimizer = SGD(module.parameters(), 0.1)
    by_step = {"scheduler": StepLR(optimizer, 2, 0.9), "interval": "step"}
    return [optimizer], [by_step, {"scheduler": plateau(optimizer), "monitor": "val_loss"}]


CASES = [
    Case(
        name="plateau-on-validation-value",
        module=schedule(plateau, monitor="val_loss"),
        options={"max_epochs": 4},
        proves=lambda r: rate(r) < 0.1,
    ),
    Case(
        name="plateau-by-step",
        module=schedule(plateau, monitor="train_loss_step", interval="step"),
        proves=lambda r: rate(r) < 1e-2,
    ),
    Case(name="plateau-not-strict", module=schedule(plateau, monitor="nowhere", strict=False)),
    Case(
        name="plateau-strict",
        module=schedule(plateau, monitor="nowhere"),
        raises=MisconfigurationException,
        refuses=ConfigurationError,
    ),
    Case(
        name="plateau-with-metric-changed",
        module=schedule(plateau, SteppedWithMetric, monitor="val_loss"),
        options={"max_epochs": 3},
    ),
    Case(name="two-schedulers", module=with_optimizers(two_schedulers), options={"max_epochs": 3}),
    Case(name="by-epoch-without-length", module=schedule(halve), data=data.unsized, proves=lambda r: rate(r) == 0.025),
]

test_parity = parity(CASES)
