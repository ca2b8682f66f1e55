"""Refuse Lightning's tuner callbacks, which need Lightning's own loops.

`Tuner(trainer)` adds its callback to `trainer.callbacks` after the constructor has checked them, so the check runs
again when a run begins.
"""

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.classes import is_a

if TYPE_CHECKING:
    from equipoise.trainer.state.run_state import RunState

__all__ = ["refuse_finder", "refuse_tuner"]

# The tuner's callbacks, with the method that adds each, and the way out.
_FINDERS = {
    BatchSizeFinder: (
        "Tuner.scale_batch_size",
        "raise the batch size by hand until memory is full, and keep accumulate_grad_batches for the rest",
    ),
    LearningRateFinder: (
        "Tuner.lr_find",
        "sweep it: `equipoise fit --multirun module.lr=1e-4,3e-4,1e-3,3e-3 trainer.max_steps=200`",
    ),
}


def refuse_finder(callback: Any) -> None:
    """Check that a callback is none of Lightning's tuner.

    Raises:
        ConfigurationError: If it is one; the message names the way out.
    """
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
    finders = [callback for callback in state.callbacks if is_a(callback, *_FINDERS)]
    if finders:
        state.callbacks = [callback for callback in state.callbacks if callback not in finders]
        refuse_finder(finders[0])
