"""Private names of Lightning behind `self.log`.

Each name stands here with the reason why nothing public does; a test notices when one of them changes.
"""

import inspect
from collections.abc import Iterable
from types import MethodType
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator

from equipoise.interop.lightning.classes import base_of

__all__ = ["CURRENT_HOOK", "LogOptions", "bind_log", "logging_levels", "unbind_log"]

# The module's attribute that says which hook is running: `LightningModule.log` reads it, and a setter would go
# through nn.Module (1 µs).
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
    # `_trainer` and `_current_fx_name` are read directly: the public property costs ten times as much.
    trainer: Any = self._trainer
    if trainer is None:
        LightningModule.log(self, name, value)  # a copy that outlived the run; the stock method warns
        return
    given = (prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, add_dataloader_idx, rank_zero_only)
    trainer.logs.add(self._current_fx_name, name, value, given, batch_size)


_log.__name__ = "log"  # so that the bound method is pickled and deep-copied as getattr(module, "log")


def bind_log(module: LightningModule, callbacks: Iterable[Callback]) -> None:
    """Gives the module our `log` for the length of a run, unless its class has one; Lightning's takes 340 µs a call.

    Args:
        module: The user's module.
        callbacks: They log through the module.
    """
    own = vars(module).get("log")
    if type(module).log is base_of(module, LightningModule).log and (own is None or _was_bound(own)):
        log = _log
        if (
            module._compiler_ctx is not None
        ):  # a compiled step must not trace into the logs; there is no public sign of it
            log = torch.compiler.disable(_log)  # type: ignore[no-untyped-call]
        vars(module)["log"] = MethodType(log, module)
    for callback in callbacks:
        vars(callback)["log"], vars(callback)["log_dict"] = module.log, module.log_dict


def _was_bound(log: Any) -> bool:
    """Whether it is what `bind_log` made, or what that becomes in a pickle: Lightning's own method, bound."""
    return isinstance(log, MethodType) and inspect.unwrap(log.__func__) in (_log, LightningModule.log)


def unbind_log(module: LightningModule, callbacks: Iterable[Callback]) -> None:
    """Takes back what `bind_log` did; a `log` that the user set on the instance stays."""
    if _was_bound(vars(module).get("log")):
        del vars(module)["log"]
    for callback in callbacks:
        vars(callback).pop("log", None)
        vars(callback).pop("log_dict", None)


def logging_levels(hook: str, on_step: bool | None, on_epoch: bool | None) -> tuple[bool, bool]:
    """Whether a hook logs values of steps and of epochs; raises if it must not log. The table has no public name."""
    return _FxValidator.check_logging_and_get_default_levels(hook, on_step=on_step, on_epoch=on_epoch)
