"""Objects in a checkpoint: what is plain data, and warnings about objects that are not created when it is read.

Hyperparameters are left out: the trainer does not use them, and `load_from_checkpoint` is Lightning's.
"""

import io
import pickle
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor

from equipoise.errors import CheckpointError
from equipoise.notices import rank_zero_warn

if TYPE_CHECKING:
    from equipoise.trainer.state.run_state import RunState

__all__ = ["is_plain", "warn_of_objects_read", "warn_of_objects_written"]


# The entries of a checkpoint in which Lightning saves hyperparameters.
_HYPERPARAMETERS = {
    f"{owner.CHECKPOINT_HYPER_PARAMS_KEY}{suffix}"
    for owner in (LightningModule, LightningDataModule)
    for suffix in ("", "_type", "_name")
} | {owner.CHECKPOINT_HYPER_PARAMS_TYPE for owner in (LightningModule, LightningDataModule)}

# Torch has deprecated the typed ones.
_WITH_CONTENT = (Tensor, torch.UntypedStorage, getattr(torch, "TypedStorage", torch.UntypedStorage))

# Entries that only a training uses.
_OF_TRAINING = {"optimizer_states", "lr_schedulers", "loops", "equipoise"}

# Types of plain values, besides containers and tensors.
_PLAIN = (str, int, float, bytes, complex, bool, type(None), torch.dtype, torch.device, torch.Size)

# Number of objects that a warning names.
_MOST_LISTED = 5


def is_plain(value: Any) -> bool:
    """Return True if a value consists of plain containers, numbers, strings and tensors."""
    # Derived classes are not plain, so types are compared exactly.
    kind = type(value)
    if kind is dict:
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    if kind in (list, tuple):
        return all(map(is_plain, value))
    return kind is Tensor or kind in _PLAIN


def warn_of_objects_written(state: "RunState", checkpoint: dict[str, Any]) -> None:
    """Warn once for each trainer that the objects in its checkpoints are not created when they are read.

    Args:
        state: The state of the trainer, which remembers the warning.
        checkpoint: The content of the file that is about to be written.
    """
    if state.objects_were_reported:
        return
    state.objects_were_reported = True

    # 1. A checkpoint that the safe reader refuses altogether.
    entries = {key: value for key, value in checkpoint.items() if key not in _HYPERPARAMETERS}
    try:
        objects = _objects_in(entries)
    except CheckpointError as error:
        rank_zero_warn(
            f"The checkpoints of this run can be read with weights_only=False alone: {error}. Save plain data, such as"
            " tensors, in place of what causes this."
        )
        return

    # 2. Objects for which it builds stand-ins.
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
        checkpoint: The content of the file.
        fitting: Whether a training resumes from it; other runs use fewer of its entries.
    """
    from equipoise.safe_loading.stand_in_search import stand_ins_in

    unused = _HYPERPARAMETERS
    if not fitting:
        unused = _HYPERPARAMETERS | _OF_TRAINING
    entries = {key: value for key, value in checkpoint.items() if key not in unused}
    objects = stand_ins_in(entries)
    if objects:
        rank_zero_warn(
            f"The checkpoint holds objects that were not created, as that could run code: {_listed(objects)}. Using one"
            " of them is an error. If you trust the file and a hook needs them, pass weights_only=False."
        )


def _listed(objects: dict[str, str]) -> str:
    """Return the first objects as a text: places and classes."""
    # "['callbacks']['mine']" is shown as "'callbacks'['mine']".
    texts = []
    for place, name in objects.items():
        shown_place = place.removeprefix("[").replace("]", "", 1)
        texts.append(f"{shown_place} ({name})")
    more = f" and {len(texts) - _MOST_LISTED} more" if len(texts) > _MOST_LISTED else ""
    return ", ".join(texts[:_MOST_LISTED]) + more


class _WithoutTensors(pickle.Pickler):
    """Pickles objects without the content of tensors, and notes whether it has met other than plain data."""

    has_objects = False

    def reducer_override(self, value: Any) -> Any:
        """Note an object; it is pickled as usual."""
        if type(value) is not OrderedDict and value is not OrderedDict:
            self.has_objects = True
        return NotImplemented

    def persistent_id(self, value: Any) -> Any:
        """Return an identifier for a tensor, and None for an object that is pickled."""
        # A tensor that wraps others is read as an object of its class.
        if isinstance(value, Tensor) and type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return None
        return "tensor" if isinstance(value, _WITH_CONTENT) else None


def _objects_in(checkpoint: dict[str, Any]) -> dict[str, str]:
    """Return the places and classes of the objects that are not created when a checkpoint is read.

    Raises:
        CheckpointError: If it cannot be read.
    """
    # 1. Write it to memory.
    file = io.BytesIO()
    pickler = _WithoutTensors(file, protocol=2)
    try:
        pickler.dump(checkpoint)
    except Exception:
        # The writer of the file raises the same error, with a better message.
        return {}

    if not pickler.has_objects:
        return {}

    # 2. Read it as the safe reader does, with None in place of each tensor.
    from equipoise.safe_loading.stand_in_search import stand_ins_in
    from equipoise.safe_loading.unpickler import load_pickle

    file.seek(0)
    try:
        return stand_ins_in(load_pickle(file, lambda identifier: None))
    except CheckpointError:
        raise
    except Exception:
        # A class that the user allows may need its tensors.
        return {}
