"""Check the arguments of `self.log`, and complete them with the defaults of the hook."""

from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric

from equipoise.interop.lightning.self_log import LogOptions
from equipoise.trainer.logging.entry import reduction_name

__all__ = ["check_value", "complete_options", "whole_value", "without_dimensions"]

# Hooks of single batches log values of steps or epochs, as the user chooses. Those of training log steps by default,
# those of evaluations epochs.
_OF_TRAINING_BATCHES = {
    "backward",
    "clip_gradients",
    "configure_gradient_clipping",
    "on_after_backward",
    "on_before_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_train_batch_start",
    "optimizer_step",
    "optimizer_zero_grad",
    "training_step",
}
_OF_EVALUATION_BATCHES = {
    "on_test_batch_end",
    "on_test_batch_start",
    "on_validation_batch_end",
    "on_validation_batch_start",
    "test_step",
    "validation_step",
}
# Hooks around epochs log values of epochs alone. All other hooks cannot log.
_OF_EPOCHS = {
    f"on_{stage}_{moment}"
    for stage in ("train", "validation", "test")
    for moment in ("start", "epoch_start", "epoch_end")
}


def check_value(name: str, value: Any) -> None:
    """Refuse a value that cannot be logged.

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

    Raises:
        MisconfigurationException: If they contradict each other, or the hook cannot log.
    """
    if options.add_dataloader_idx and "/dataloader_idx_" in name:
        raise MisconfigurationException(
            f"The name {name!r} holds a loader's index. It is appended by itself; say add_dataloader_idx=False to"
            " do so by hand."
        )
    on_step, on_epoch = _levels(hook, name, options)
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


def _levels(hook: str, name: str, options: LogOptions) -> tuple[bool, bool]:
    """Return whether a value is one of steps, and one of epochs: by the user's choice, else by that of the hook."""
    if hook not in _OF_TRAINING_BATCHES | _OF_EVALUATION_BATCHES | _OF_EPOCHS:
        raise MisconfigurationException(
            f"You can't call `self.log({name!r}, ...)` in `{hook}`. Log in a hook of batches or epochs, or by the"
            " logger's own object, `self.logger.experiment`."
        )
    is_of_training = hook in _OF_TRAINING_BATCHES
    on_step = is_of_training if options.on_step is None else options.on_step
    on_epoch = not is_of_training if options.on_epoch is None else options.on_epoch
    if hook in _OF_EPOCHS and (on_step or not on_epoch):
        raise MisconfigurationException(
            f"You can't call `self.log({name!r}, on_step={on_step}, on_epoch={on_epoch})` in `{hook}`, which is called"
            " once per epoch. Leave on_step and on_epoch out."
        )
    return on_step, on_epoch
