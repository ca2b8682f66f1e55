"""Whole tensors, gathered from the shards of all processes."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["whole"]


def whole(value: Any, *, keep: bool = True) -> Any:
    """Return a tensor in shards as a whole on the CPU; called in all processes.

    Args:
        value: The tensor. Everything else is returned as it is.
        keep: Whether this process needs the values. False: a tensor without memory. Default: True.
    """
    if not isinstance(value, DTensor):
        return value
    gathered = value.detach().full_tensor()  # type: ignore[attr-defined]
    if keep:
        return gathered.cpu()
    return torch.empty(gathered.shape, dtype=gathered.dtype, device="meta")
