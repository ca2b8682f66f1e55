"""A module that is trained, saved in the midst of its second epoch, and resumed as another object."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.support.resumption import SavesInHooks
from tests.support.trainer_runs import loader, trainer

__all__ = ["fit", "resumed"]

Module = TypeVar("Module")
BATCHES = 2


def fit(module: Module, *callbacks: Any, path: Path | None = None) -> Module:
    """Train for two epochs of two batches; return the module."""
    trainer(max_epochs=2, callbacks=list(callbacks)).fit(module, loader(BATCHES), ckpt_path=path)
    return module


def resumed(make: Callable[[], Module], folder: Path) -> Module:
    """Return the module of the run that continues after the third of the four batches."""
    fit(make(), saves := SavesInHooks(folder, ["on_train_batch_end"], [3]))
    return fit(make(), path=saves.saved[0].path)
