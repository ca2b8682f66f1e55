"""From which checkpoint a fit can be continued, and what is lost since, for messages at its end and at Ctrl-C."""

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from equipoise.formats import counted, format_path
from equipoise.interop.lightning.classes import is_a
from equipoise.interop.remote.paths import AnyPath, to_path
from equipoise.trainer.checkpointing.file import newest_first

__all__ = ["newest_saved", "note_interrupt"]


def newest_saved(callbacks: Iterable[Any]) -> AnyPath | None:
    """Return the newest of the checkpoints that the callbacks of a fit have saved; None if there is none."""
    paths: set[str] = set()
    for callback in callbacks:
        if is_a(callback, ModelCheckpoint):
            paths.update([callback.last_model_path, callback.best_model_path, *callback.best_k_models])
        elif is_a(callback, OnExceptionCheckpoint):
            paths.add(str(callback.ckpt_path))
    return next(iter(newest_first([to_path(path) for path in paths if path])), None)


def note_interrupt(error: KeyboardInterrupt, newest: AnyPath | None, steps: int) -> None:
    """Note at an interrupt of a fit what is lost, and how to continue.

    Args:
        error: The interrupt.
        newest: The newest checkpoint of the fit; None if there is none.
        steps: Steps that the fit has made; 0 if this process does not know.
    """
    if newest is None:
        error.add_note(f"There is no checkpoint of this fit.{_loss(steps)}")
        return
    from equipoise.parallel.shards.reading import ShardReader, is_sharded_checkpoint
    from equipoise.trainer.checkpointing.file_reading import read_checkpoint

    file = newest
    if is_sharded_checkpoint(newest):
        file = ShardReader(newest).rest
    saved = read_checkpoint(file, values=False).get("global_step", 0)
    path = format_path(str(newest))
    error.add_note(f"The newest checkpoint is of step {saved:,}.{_loss(steps - saved)} ckpt_path='{path}' continues.")


def _loss(steps: int) -> str:
    """Return the sentence that says how many steps are lost; empty for none."""
    if steps <= 0:
        return ""
    return f" Lost: {counted(steps, 'step')}."
