"""Compute without the tensors that autograd saves for a backward that never comes."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["REENTRANT_CHECKPOINTING", "without_saved_tensors"]

REENTRANT_CHECKPOINTING = (
    "Activation checkpointing with use_reentrant=True cannot compute the gradients of a stage. Use"
    " torch.utils.checkpoint.checkpoint(..., use_reentrant=False); models of transformers take"
    " gradient_checkpointing_enable({'use_reentrant': False})."
)
"""Message about reentrant checkpointing, which torch refuses where gradients of chosen tensors are computed."""

Result = TypeVar("Result")


class _SavedTensorNeeded(Exception):
    """Raised if the computation itself runs backward."""


def _drop(tensor: Tensor) -> None:
    """Save nothing in the place of a tensor."""


def _refuse(packed: None) -> Any:
    """Raise an error where backward needs a tensor."""
    raise _SavedTensorNeeded


def without_saved_tensors(compute: Callable[[], Result]) -> Result:
    """Return the result of a computation whose graph keeps no tensors: a whole network has too many of them.

    If the computation itself runs backward, it is repeated with these tensors.

    Args:
        compute: The computation. It begins in the same state each time.
    """
    try:
        with saved_tensors_hooks(_drop, _refuse):
            return compute()
    except _SavedTensorNeeded:
        # The tensors of this computation are released with the error, before the next one.
        pass
    return compute()
