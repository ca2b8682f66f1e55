"""Check the arguments of `self.log`, and complete them with the defaults of the hook."""

from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric

from equipoise.interop.lightning.self_log import LogOptions, logging_levels
from equipoise.trainer.logging.entry import reduction_name

__all__ = ["check_value", "complete_options", "whole_value", "without_dimensions"]


def check_value(name: str, value: Any) -> None:
    """Refuse a value that cannot be logged.

    Args:
        name: The name under which it is logged.
        value: The value.

    Raises:
        ValueError: If it is no number, tensor or metric.
    """
    if not isinstance(value, Metric | Tensor | int | float):
        raise ValueError(
            f"`self.log({name!r}, ...)` takes a number, a tensor of one element or a torchmetrics Metric, not"
            f" {type(value).__name__}."
        )


def without_dimensions(name: str, value: Tensor) -> Tensor:
    """Return a tensor of one element without its dimensions.

    Args:
        name: The name under which it is logged.
        value: The tensor.

    Raises:
        ValueError: If it has several elements, or none.
    """
    if value.numel() != 1:
        raise ValueError(
            f"`self.log({name!r}, ...)` was called with a tensor of shape {tuple(value.shape)}, but it must have a"
            " single element. Try `.mean()`."
        )
    return value.squeeze()


def whole_value(value: Tensor) -> Tensor:
    """Return a value of tensors that are in shards over processes as a whole; every other tensor as it is."""
    gather = getattr(value, "full_tensor", None)
    if gather is None:
        return value
    whole: Tensor = gather()
    return whole


def complete_options(hook: str, name: str, options: LogOptions) -> LogOptions:
    """Return the arguments of `self.log` with the defaults of the hook.

    Args:
        hook: The hook that logs.
        name: The name of the value.
        options: The arguments of the user.

    Raises:
        MisconfigurationException: If they contradict each other, or the hook cannot log.
    """
    if options.add_dataloader_idx and "/dataloader_idx_" in name:
        raise MisconfigurationException(
            f"The name {name!r} holds a loader's index. It is appended by itself; say add_dataloader_idx=False to"
            " do so by hand."
        )
    on_step, on_epoch = logging_levels(hook, options.on_step, options.on_epoch)
    if not on_step and not on_epoch:
        raise MisconfigurationException(
            f"`self.log({name!r}, on_step=False, on_epoch=False)` in `{hook}` logs nothing."
        )
    return options._replace(
        on_step=on_step,
        on_epoch=on_epoch,
        logger=options.logger is not False,
        reduce_fx=reduction_name(options.reduce_fx),
    )
