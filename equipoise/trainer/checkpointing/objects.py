"""Warnings about objects in a checkpoint that are not created when it is read.

Hyperparameters are not looked at: the trainer does not use them, and `load_from_checkpoint` is Lightning's.
"""

import io
import pickle
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor

from equipoise.errors import CheckpointError
from equipoise.notices import rank_zero_warn
from equipoise.safe_loading.stand_in import stand_ins_in
from equipoise.safe_loading.unpickler import load_pickle

if TYPE_CHECKING:
    from equipoise.trainer.trainer import Trainer

__all__ = ["warn_of_objects_read", "warn_of_objects_written"]

_HYPERPARAMETERS = {
    f"{owner.CHECKPOINT_HYPER_PARAMS_KEY}{end}"
    for owner in (LightningModule, LightningDataModule)
    for end in ("", "_type", "_name")
} | {LightningModule.CHECKPOINT_HYPER_PARAMS_TYPE, LightningDataModule.CHECKPOINT_HYPER_PARAMS_TYPE}
_OF_TRAINING = {"optimizer_states", "lr_schedulers", "loops", "equipoise"}
_MOST_LISTED = 5


def warn_of_objects_written(trainer: "Trainer", checkpoint: dict[str, Any]) -> None:
    """Warn once for each trainer that the objects in its checkpoints are not created when they are read.

    Args:
        trainer: The trainer, which remembers that it has warned.
        checkpoint: What is about to be written.
    """
    if trainer.objects_were_reported:
        return
    trainer.objects_were_reported = True
    try:
        objects = _objects_in({key: value for key, value in checkpoint.items() if key not in _HYPERPARAMETERS})
    except CheckpointError as error:
        rank_zero_warn(
            f"The checkpoints of this run can be read with weights_only=False alone: {error}. Save plain data, such as"
            " tensors, in place of what causes this."
        )
        return
    if objects:
        rank_zero_warn(
            f"The checkpoints of this run hold objects that are no plain data: {_listed(objects)}. They are"
            " written, but not created when the file is read, as that could run code. If a hook needs them, resume with"
            " `fit(..., ckpt_path=..., weights_only=False)`, or allow their classes by"
            " `torch.serialization.add_safe_globals([...])`, or save their `state_dict()` instead."
        )


def warn_of_objects_read(checkpoint: dict[str, Any], *, fitting: bool) -> None:
    """Warn of the objects in a checkpoint that were not created.

    Args:
        checkpoint: What was read.
        fitting: Whether a training goes on from it; otherwise it uses less of the checkpoint.
    """
    unused = _HYPERPARAMETERS if fitting else _HYPERPARAMETERS | _OF_TRAINING
    objects = stand_ins_in({key: value for key, value in checkpoint.items() if key not in unused})
    if objects:
        rank_zero_warn(
            f"The checkpoint holds objects that were not created, as that could run code: {_listed(objects)}. Using one"
            " of them is an error. If you trust the file and a hook needs them, pass weights_only=False."
        )


def _listed(objects: dict[str, str]) -> str:
    shown = [f"{place.removeprefix('[').replace(']', '', 1)} ({name})" for place, name in objects.items()]
    more = f" and {len(shown) - _MOST_LISTED} more" if len(shown) > _MOST_LISTED else ""
    return ", ".join(shown[:_MOST_LISTED]) + more


class _WithoutTensors(pickle.Pickler):
    """Pickles objects without the content of tensors."""

    def persistent_id(self, value: Any) -> Any:
        """Return a sign for tensors, and None for what is pickled."""
        return "tensor" if isinstance(value, Tensor | torch.UntypedStorage | torch.TypedStorage) else None


def _objects_in(checkpoint: dict[str, Any]) -> dict[str, str]:
    """Return where the objects are that are not created when a checkpoint is read, and their classes.

    Raises:
        CheckpointError: If it cannot be read.
    """
    file = io.BytesIO()
    try:
        _WithoutTensors(file, protocol=2).dump(checkpoint)
    except Exception:
        return {}  # writing it will say why
    file.seek(0)
    try:
        return stand_ins_in(load_pickle(file, lambda identifier: None))
    except CheckpointError:
        raise
    except Exception:
        return {}  # a class that the user allows may need its tensors
