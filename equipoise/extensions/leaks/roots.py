"""The watch of a run: the objects at which the search for leaks starts, and those that keep tensors on purpose."""

from typing import Any

from lightning.pytorch import LightningModule
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from equipoise.extensions.leaks.watch import LeakWatch

__all__ = ["keeps_tensors", "roots_of", "watch_run"]


def watch_run(trainer: Any, module: LightningModule, memory_logger: object, began: float) -> LeakWatch:
    """Return a watch for the leaks of a run.

    Args:
        trainer: The trainer.
        module: The user's module.
        memory_logger: The callback that searches.
        began: Start of the run, by `time.monotonic`.
    """
    return LeakWatch(lambda: roots_of(trainer, module, memory_logger), keeps_tensors, began=began)


def roots_of(trainer: Any, module: LightningModule, memory_logger: object) -> dict[str, object]:
    """Return the objects that users know by name, by these names.

    Args:
        trainer: The trainer.
        module: The user's module.
        memory_logger: The callback that searches; it is left out.
    """
    roots: dict[str, object] = {type(module).__name__: module}
    callbacks = [callback for callback in trainer.callbacks if callback is not memory_logger]
    datamodule = getattr(trainer, "datamodule", None)
    for root in (*callbacks, *trainer.loggers, datamodule):
        if root is not None:
            roots.setdefault(type(root).__name__, root)
    # The trainer comes last, so that a shorter path through another object is reported.
    return {**roots, "trainer": trainer}


def keeps_tensors(value: object) -> bool:
    """Return True for metrics and optimisers, which keep states, and for data sets, which keep their data."""
    # `isinstance` would ask a proxy for its class, which may raise.
    return issubclass(type(value), Metric | Optimizer | Dataset | DataLoader)
