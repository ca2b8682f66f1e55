"""Choose the checkpoint that a path, "best", "last" or nothing refers to."""

import os
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.callbacks import last_checkpoints
from equipoise.interop.lightning.classes import is_a
from equipoise.notices import rank_zero_warn

if TYPE_CHECKING:
    from equipoise.trainer.trainer import Trainer

__all__ = ["select_checkpoint"]


def select_checkpoint(trainer: "Trainer", ckpt_path: Any, *, module_given: bool) -> Any:
    """The path that `ckpt_path` stands for; None for none.

    Args:
        trainer: The trainer, whose checkpoint callbacks know the best and the last.
        ckpt_path: A path, "best", "last" or None.
        module_given: Whether a module was passed; without one, the best checkpoint of the last fit is meant.

    Raises:
        ConfigurationError: If there is no such checkpoint.
    """
    word = trainer.state.fn.value if trainer.state.fn is not None else "fit"
    if ckpt_path is not None and not isinstance(ckpt_path, str | os.PathLike):
        raise ConfigurationError(f"ckpt_path must be a path, 'best', 'last' or None, not {ckpt_path!r}.")
    if ckpt_path is not None and not os.fspath(ckpt_path):
        raise ConfigurationError("ckpt_path must be a path, 'best', 'last' or None, not empty.")
    if ckpt_path is None and trainer.managed_ckpt_path is not None:
        return trainer.managed_ckpt_path
    if ckpt_path is None:
        keepers = [callback for callback in trainer.callbacks if is_a(callback, OnExceptionCheckpoint)]
        if keepers and trainer.state.fn == TrainerFn.FITTING:
            ckpt_path = "last"
        elif module_given:
            return None
        else:
            rank_zero_warn(
                f"`{word}` was called without a module: the best checkpoint of the last fit is used. Say so with"
                " ckpt_path='best'."
            )
            ckpt_path = "best"
    if ckpt_path == "best":
        return _best(trainer, word)
    return _last(trainer, word) if ckpt_path == "last" else ckpt_path


def _best(trainer: "Trainer", word: str) -> str:
    keeper = trainer.checkpoint_callback
    if keeper is None:
        raise ConfigurationError(
            f"`{word}(ckpt_path='best')` needs a ModelCheckpoint among the callbacks, but there is none. Give a path,"
            f" or pass the module, `{word}(module)`, to use the weights that it has."
        )
    if len(trainer.checkpoint_callbacks) > 1:
        rank_zero_warn(
            f"`{word}(ckpt_path='best')`: {len(trainer.checkpoint_callbacks)} callbacks save checkpoints. The best of"
            f" the first is used, which monitors {getattr(keeper, 'monitor', None)!r}. Give a path for another."
        )
    if not (path := getattr(keeper, "best_model_path", "")):
        why = " With fast_dev_run nothing is saved." if trainer.fast_dev_run else ""
        raise ConfigurationError(
            f"`{word}(ckpt_path='best')`: no checkpoint was saved yet.{why} Give a path, or fit first."
        )
    return str(path)


def _last(trainer: "Trainer", word: str) -> str | None:
    """The newest of the files that callbacks call their last; none is no error: one may say "last" at the first fit."""
    from lightning.fabric.utilities.cloud_io import get_filesystem

    found: set[str] = set()
    for callback in trainer.callbacks:
        if is_a(callback, ModelCheckpoint):
            found |= last_checkpoints(callback, trainer)
        elif is_a(callback, OnExceptionCheckpoint):
            found.add(str(callback.ckpt_path))
    existing = {path: get_filesystem(path).modified(path) for path in found if get_filesystem(path).exists(path)}
    if not existing:
        rank_zero_warn(
            f"`{word}(ckpt_path='last')`: there is no last checkpoint yet, so the module's present weights are used."
            " ModelCheckpoint(save_last=True) writes one."
        )
        return None
    return max(existing, key=lambda path: existing[path])
