"""Private names of the modules of Lightning, all of them attributes.

Each name has a comment with the reason why no public one suffices, and with the way of versions without it.
"""

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.profilers import Profiler
from torch import nn

from equipoise.interop.lightning.classes import base_of, is_a
from equipoise.interop.lightning.self_log import CURRENT_HOOK

__all__ = [
    "as_configured",
    "attach_profiler",
    "forget_run",
    "hyperparameters_name",
    "pretend_device",
    "untoggled_parameters",
]


def hyperparameters_name(owner: LightningModule | LightningDataModule) -> str | None:
    """Return the argument of `__init__` that holds all hyperparameters; `load_from_checkpoint` needs its name.

    Without Lightning's note of it, it is the only argument, if no hyperparameter has its name.
    """
    state = vars(owner)
    if "_hparams_name" in state:
        name: str | None = state["_hparams_name"]
        return name
    names = [*inspect.signature(type(owner)).parameters]
    is_all = len(names) == 1 and bool(owner.hparams) and names[0] not in owner.hparams
    return names[0] if is_all else None


def pretend_device(module: LightningModule, device: torch.device) -> None:
    """Set `self.device`, which has no setter, to the device where the module will be after `setup`.

    Without the name, `self.device` is that of before until then.
    """
    for child in module.modules():
        if is_a(child, LightningModule) and "_device" in vars(child):
            child._device = device


@contextmanager
def as_configured(module: LightningModule) -> Iterator[None]:
    """Let `configure_model` count as not overridden, for callbacks that call it in `setup`: it was called before."""
    attributes = vars(module)
    hook_of_instance = attributes.get("configure_model")
    attributes["configure_model"] = MethodType(base_of(module, LightningModule).configure_model, module)
    try:
        yield
    finally:
        del attributes["configure_model"]
        if hook_of_instance is not None:
            attributes["configure_model"] = hook_of_instance


def forget_run(module: LightningModule) -> None:
    """Clear the state that a run leaves in a module: the current hook, the names of its metrics, and the mesh."""
    state = vars(module)
    for name in (CURRENT_HOOK, "_metric_attributes", "_device_mesh"):
        if name in state:
            state[name] = None


def untoggled_parameters(module: nn.Module) -> dict[nn.Parameter, bool]:
    """Return `requires_grad` of the parameters that `toggle_optimizer` has switched, as it was and will be again.

    Without the name, a checkpoint that is written within `toggle_optimizer` takes the parameters as they are.
    """
    toggled: dict[nn.Parameter, bool] = getattr(module, "_param_requires_grad_state", {})
    return toggled


def attach_profiler(profiler: Profiler, module: LightningModule) -> None:
    """Give a profiler a weak reference to its module, by which PyTorchProfiler names modules.

    In a version without the name nothing reads it.
    """
    profiler._lightning_module = weakref.proxy(module)  # type: ignore[attr-defined]
