"""Refuse Lightning's tuner callbacks, which need Lightning's own loops.

`Tuner(trainer)` adds its callback to `trainer.callbacks` after the constructor has checked them, so the same check is
made again when a run begins.
"""

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.classes import is_a

if TYPE_CHECKING:
    from equipoise.trainer.trainer import Trainer

__all__ = ["refuse_finder", "refuse_tuner"]

_FINDERS = (BatchSizeFinder, LearningRateFinder)
_CALLS = {BatchSizeFinder: "Tuner.scale_batch_size", LearningRateFinder: "Tuner.lr_find"}


def refuse_finder(callback: Any) -> None:
    """Check that a callback is none of Lightning's tuner.

    Raises:
        ConfigurationError: Naming what to do instead.
    """
    kind = next((kind for kind in _FINDERS if is_a(callback, kind)), None)
    if kind is None:
        return
    instead = (
        "raise the batch size by hand until memory is full, and keep accumulate_grad_batches for the rest"
        if kind is BatchSizeFinder
        else "sweep it: `equipoise fit --multirun module.lr=1e-4,3e-4,1e-3,3e-3 trainer.max_steps=200`"
    )
    raise ConfigurationError(
        f"{type(callback).__name__}, which `{_CALLS[kind]}` uses, works inside Lightning's own loops and cannot run"
        f" here. Instead, {instead}."
    )


def refuse_tuner(trainer: "Trainer") -> None:
    """Check the callbacks when a run begins; a finder leaves the list, so the trainer can go on to be used.

    Raises:
        ConfigurationError: If the tuner has added one of its callbacks.
    """
    found = [callback for callback in trainer.callbacks if is_a(callback, *_FINDERS)]
    if found:
        trainer.callbacks = [callback for callback in trainer.callbacks if callback not in found]
        refuse_finder(found[0])
