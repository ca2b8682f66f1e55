"""Private names of the modules of Lightning.

Each name stands here with the reason why nothing public does; a test notices when one of them changes.
"""

import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.fabric.utilities.init import _EmptyInit
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.profilers import Profiler

from equipoise.interop.lightning.classes import is_a

__all__ = ["attach_profiler", "empty_init", "forget_run", "hyperparameters_name", "pretend_device"]


def hyperparameters_name(owner: LightningModule | LightningDataModule) -> str | None:
    """Return the argument of `__init__` that holds all hyperparameters; `load_from_checkpoint` needs its name."""
    name: str | None = getattr(owner, "_hparams_name", None)
    return name


def pretend_device(module: LightningModule, device: torch.device) -> None:
    """Set `self.device`, which has no setter, to the device where the module will be after `setup`."""
    for child in module.modules():
        if is_a(child, _DeviceDtypeModuleMixin):
            child._device = device


def forget_run(module: LightningModule) -> None:
    """Clear the state that a run leaves in a module: the current hook, and the names of its metrics."""
    module._current_fx_name = None
    module._metric_attributes = None


def empty_init() -> AbstractContextManager[Any]:
    """Return a context that skips the initialisation of parameters; Lightning's class has a private name."""
    return _EmptyInit()


def attach_profiler(profiler: Profiler, module: LightningModule) -> None:
    """Give a profiler a weak reference to its module, which the names of its files depend on."""
    profiler._lightning_module = weakref.proxy(module)  # type: ignore[attr-defined]
