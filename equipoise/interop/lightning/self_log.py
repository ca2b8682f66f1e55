"""Bind `self.log` of modules and callbacks to the trainer's logs; private names of Lightning behind it.

Each name has a comment with the reason why no public one suffices, and with the way of versions without it.
"""

import inspect
from collections.abc import Iterable
from types import MethodType
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule

from equipoise.interop.lightning.classes import base_of, module_classes
from equipoise.interop.torch.modules import is_compiled

__all__ = ["CURRENT_HOOK", "LogOptions", "bind_log", "has_own_log", "unbind_log"]

# Entry of the module's `__dict__` that names the current hook: `LightningModule.log` reads it, and a setter would go
# through nn.Module (1 µs). Where Lightning reads another name, ours alone reads this one.
CURRENT_HOOK = "_current_fx_name"


class LogOptions(NamedTuple):
    """The arguments of `self.log` that must be the same in every call for one name."""

    prog_bar: bool = False
    logger: bool | None = None
    on_step: bool | None = None
    on_epoch: bool | None = None
    reduce_fx: Any = "mean"
    sync_dist: bool = False
    add_dataloader_idx: bool = True
    rank_zero_only: bool = False


def _log(
    self: LightningModule,
    name: str,
    value: Any,
    prog_bar: bool = False,
    logger: bool | None = None,
    on_step: bool | None = None,
    on_epoch: bool | None = None,
    reduce_fx: Any = "mean",
    enable_graph: bool = False,
    sync_dist: bool = False,
    sync_dist_group: Any | None = None,
    add_dataloader_idx: bool = True,
    batch_size: int | None = None,
    metric_attribute: str | None = None,
    rank_zero_only: bool = False,
) -> None:
    # `_trainer` is read directly: the public property costs ten times as much.
    trainer: Any
    try:
        trainer = self._trainer
    except AttributeError:
        trainer = _trainer_of(self)
    if trainer is None:
        # This is a copy that outlived the run; the stock method warns.
        base_of(self, LightningModule).log(self, name, value)
        return
    options = (
        prog_bar,
        logger,
        on_step,
        on_epoch,
        reduce_fx,
        sync_dist,
        add_dataloader_idx,
        rank_zero_only,
    )
    trainer.logs.add(self._current_fx_name, name, value, options, batch_size, self)


def _trainer_of(module: LightningModule) -> Any:
    """Return the trainer by the public property, which raises an error for None."""
    try:
        return module.trainer
    except RuntimeError:
        return None


# The bound method is pickled and deep-copied as getattr(module, "log").
_log.__name__ = "log"


def bind_log(module: LightningModule, callbacks: Iterable[Callback]) -> None:
    """Bind our `log` to the module for the duration of a run; Lightning's takes 340 µs a call.

    A `log` that the module's class or the user defines stays.

    Args:
        module: The user's module.
        callbacks: They log through the module.
    """
    stock_class = base_of(module, LightningModule)
    log_of_instance = vars(module).get("log")
    is_free = log_of_instance is None or _was_bound(log_of_instance)
    if type(module).log is stock_class.log and is_free:
        log = _log
        # A compiled step must not trace into the logs.
        if is_compiled(module):
            log = torch.compiler.disable(_log)  # type: ignore[no-untyped-call]
        vars(module)["log"] = MethodType(log, module)
    for callback in callbacks:
        attributes = vars(callback)
        attributes["log"] = module.log
        attributes["log_dict"] = module.log_dict


def has_own_log(module: LightningModule) -> bool:
    """Return True if the module's class or the user has defined its `log`, so that `bind_log` left it."""
    return not _was_bound(vars(module).get("log"))


def _was_bound(log: Any) -> bool:
    """Return True for a method that `bind_log` bound, or for Lightning's bound method, its form after a pickle."""
    if not isinstance(log, MethodType):
        return False
    function = inspect.unwrap(log.__func__)
    return function is _log or any(function is kind.log for kind in module_classes())


def unbind_log(module: LightningModule, callbacks: Iterable[Callback]) -> None:
    """Undo `bind_log`. A `log` that the user set on the instance stays."""
    if _was_bound(vars(module).get("log")):
        del vars(module)["log"]
    for callback in callbacks:
        attributes = vars(callback)
        attributes.pop("log", None)
        attributes.pop("log_dict", None)
