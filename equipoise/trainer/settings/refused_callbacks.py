"""Refuse callbacks that need Lightning's own loops: finders that may search within a run.

Lightning's finders themselves search before a fit. The check runs again when a run begins, since users may add
callbacks after the constructor has checked them.
"""

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.classes import is_a
from equipoise.interop.lightning.finders import is_finder, is_stock_finder

if TYPE_CHECKING:
    from equipoise.trainer.state.run_state import RunState

__all__ = ["refuse_finder", "refuse_finder_of_module", "refuse_finders"]


def refuse_finder(callback: Any) -> None:
    """Check that a callback is not derived from one of Lightning's finders.

    Raises:
        ConfigurationError: If it is; the message names the way out.
    """
    if is_stock_finder(callback):
        return
    for kind in (BatchSizeFinder, LearningRateFinder):
        if is_a(callback, kind):
            raise ConfigurationError(
                f"{type(callback).__name__} is derived from {kind.__name__}, and may search within a run, in"
                f" Lightning's own loops. Instead, pass a {kind.__name__} itself, which searches before the fit."
            )


def refuse_finder_of_module(callback: Any) -> None:
    """Check that a callback that the module brings is no finder: it comes when the search is over.

    Raises:
        ConfigurationError: If it is one.
    """
    if is_finder(callback):
        raise ConfigurationError(
            f"`configure_callbacks` returned a {type(callback).__name__}, which searches before the run that calls"
            " `configure_callbacks`. Instead, pass it to Trainer(callbacks=...)."
        )


def refuse_finders(state: "RunState") -> None:
    """Check the callbacks when a run begins, and remove finders, so that the trainer can still be used.

    Raises:
        ConfigurationError: If a callback has been added that is derived from a finder.
    """
    finders = [callback for callback in state.callbacks if is_finder(callback) and not is_stock_finder(callback)]
    if finders:
        state.callbacks = [callback for callback in state.callbacks if callback not in finders]
        refuse_finder(finders[0])
