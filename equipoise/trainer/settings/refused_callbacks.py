"""Refuse callbacks of Lightning's tuner that need Lightning's own loops.

`Tuner(trainer)` adds its callback to `trainer.callbacks` after the constructor has checked them, so the check runs
again when a run begins.
"""

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.classes import is_a
from equipoise.interop.lightning.finders import is_finder, is_stock_finder

if TYPE_CHECKING:
    from equipoise.trainer.state.run_state import RunState

__all__ = ["refuse_finder", "refuse_tuner"]

# The tuner's callbacks, with the method that adds each, and the way out.
_FINDERS = {
    BatchSizeFinder: (
        "Tuner.scale_batch_size",
        "raise the batch size by hand until memory is full, and keep accumulate_grad_batches for the rest",
    ),
    # A LearningRateFinder itself searches before a fit; classes derived from it may search within.
    LearningRateFinder: (
        "Tuner.lr_find",
        "pass a LearningRateFinder itself, which searches before the fit",
    ),
}


def refuse_finder(callback: Any) -> None:
    """Check that a callback is none of Lightning's tuner.

    Raises:
        ConfigurationError: If it is one; the message names the way out.
    """
    if is_stock_finder(callback):
        return
    for kind, (call, way_out) in _FINDERS.items():
        if is_a(callback, kind):
            raise ConfigurationError(
                f"{type(callback).__name__}, which `{call}` uses, works inside Lightning's own loops and cannot run"
                f" here. Instead, {way_out}."
            )


def refuse_tuner(state: "RunState") -> None:
    """Check the callbacks when a run begins, and remove finders, so that the trainer can still be used.

    Raises:
        ConfigurationError: If the tuner has added one of its callbacks.
    """
    finders = [callback for callback in state.callbacks if is_finder(callback) and not is_stock_finder(callback)]
    if finders:
        state.callbacks = [callback for callback in state.callbacks if callback not in finders]
        refuse_finder(finders[0])
