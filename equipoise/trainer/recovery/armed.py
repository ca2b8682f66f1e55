"""Whether a run recovers from out-of-memory errors; other runs load no further module of this folder."""

from typing import TYPE_CHECKING

from equipoise.callbacks.callback import Callback
from equipoise.trainer.hooks.hooks import overrides

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext

__all__ = ["is_armed"]


def is_armed(context: "RunContext") -> bool:
    """Return True if a callback decides what happens when memory runs out."""
    return any(overrides(callback, "on_out_of_memory", Callback) for callback in context.hooks.callbacks)
