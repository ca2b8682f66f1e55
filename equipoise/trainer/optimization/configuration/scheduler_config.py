"""Configurations of learning-rate schedulers, in all forms that `configure_optimizers` may return."""

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.classes import is_overridden
from equipoise.notices import rank_zero_warn
from equipoise.validation import describe_value, is_whole

__all__ = ["check_scheduler", "scheduler_config"]

# Keys that say how the trainer steps a scheduler, which it does in automatic optimisation only.
_AUTOMATIC_KEYS = ("reduce_on_plateau", "monitor", "strict")


def scheduler_config(scheduler: Any, module: LightningModule) -> LRSchedulerConfig:
    """Return the configuration of one scheduler, with the defaults of its form.

    Raises:
        ConfigurationError: If an entry is missing or wrong.
    """
    # 1. The entries, as the user returned them.
    entries = dict(scheduler) if isinstance(scheduler, Mapping) else {"scheduler": scheduler}
    supported = {field.name for field in fields(LRSchedulerConfig)}
    unsupported = entries.keys() - supported
    if unsupported:
        near = [name for key in sorted(map(str, unsupported)) for name in get_close_matches(key, supported, n=1)]
        hint = f" Did you mean {near[0]!r}?" if near else ""
        rank_zero_warn(
            f"Found unsupported keys in the lr scheduler dict: {unsupported}.{hint}", category=RuntimeWarning
        )
        entries = {key: value for key, value in entries.items() if key in supported}
    _check_entries(entries)

    # 2. Their defaults.
    entries.setdefault("monitor", None)
    if module.automatic_optimization:
        entries.setdefault("reduce_on_plateau", isinstance(entries["scheduler"], ReduceLROnPlateau))
        _check_automatic(entries)
        return LRSchedulerConfig(**entries)

    # 3. In manual optimisation the user steps the scheduler.
    ignored = [key for key in ("reduce_on_plateau", "strict") if key in entries]
    if ignored:
        rank_zero_warn(
            f"The lr scheduler keys {ignored} are ignored: in manual optimisation you step it yourself.",
            category=RuntimeWarning,
        )
    return LRSchedulerConfig(**{key: value for key, value in entries.items() if key not in _AUTOMATIC_KEYS})


def _check_entries(entries: dict[str, Any]) -> None:
    """Check the scheduler, interval and frequency of a configuration."""
    if "scheduler" not in entries:
        raise ConfigurationError(
            f"A learning-rate scheduler's dictionary needs the key 'scheduler', but has {list(entries)}."
        )
    interval = entries.get("interval", "epoch")
    if interval not in ("step", "epoch"):
        raise ConfigurationError(f"The interval of a learning-rate scheduler is 'step' or 'epoch', not {interval!r}.")
    frequency = entries.get("frequency", 1)
    if not is_whole(frequency, least=1):
        raise ConfigurationError(
            f"The frequency of a learning-rate scheduler is a positive integer, not {frequency!r}."
        )


def _check_automatic(entries: dict[str, Any]) -> None:
    """Check what the trainer needs to step a scheduler."""
    # A step without the value would be torch's error, far from the cause.
    if entries["reduce_on_plateau"] and entries["monitor"] is None:
        raise ConfigurationError(
            "ReduceLROnPlateau needs the name of a logged value to watch. Return"
            " {'optimizer': optimizer, 'lr_scheduler': {'scheduler':"
            " scheduler, 'monitor': 'val_loss'}} from `configure_optimizers`."
        )
    # A cycle is mostly as long as the training has steps.
    if isinstance(entries["scheduler"], OneCycleLR) and entries.get("interval", "epoch") == "epoch":
        rank_zero_warn(
            "OneCycleLR steps once per epoch here. Did you mean {'interval': 'step'}?", category=RuntimeWarning
        )


def check_scheduler(config: LRSchedulerConfig, optimizers: list[Optimizer], module: LightningModule) -> None:
    """Check the scheduler of a configuration.

    Raises:
        ConfigurationError: If it is no scheduler, the trainer cannot step it, or its optimiser is another one.
    """
    # 1. Checkpoints hold its state. A class instead of an object is a frequent mistake.
    scheduler = config.scheduler
    has_state_dict = callable(getattr(scheduler, "state_dict", None))
    has_load_state_dict = callable(getattr(scheduler, "load_state_dict", None))
    if isinstance(scheduler, type) or not has_state_dict or not has_load_state_dict:
        raise ConfigurationError(
            "A learning-rate scheduler is an object with the methods `step`, `state_dict` and `load_state_dict`, but"
            f" `configure_optimizers` returned {describe_value(scheduler)}. Return one, such as"
            " `StepLR(optimizer, 10)`, or leave it out."
        )

    # 2. The trainer knows how to step schedulers of torch.
    name = type(scheduler).__name__
    trainer_steps = module.automatic_optimization and not is_overridden("lr_scheduler_step", module)
    if trainer_steps and not isinstance(scheduler, (LRScheduler, ReduceLROnPlateau)):
        raise ConfigurationError(
            f"{name} does not follow torch's LRScheduler. Say how it steps by overriding `lr_scheduler_step` in"
            " your module."
        )

    # 3. A scheduler of another optimiser would change nothing.
    if getattr(scheduler, "optimizer", optimizers[0]) not in optimizers:
        raise ConfigurationError(
            f"The scheduler {name} belongs to another optimiser than `configure_optimizers` returned. Make it for that"
            " one."
        )
