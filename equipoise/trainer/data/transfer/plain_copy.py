"""A batch copied to a device after the work that is queued there."""

from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

__all__ = ["copy_batch"]


def copy_batch(batch: Any, device: torch.device) -> Any:
    """Copy a batch to a device; a tensor, or tensors in a tuple or list, that are on it are returned as they are."""
    # This runs for every batch. The comparison costs less than the names of devices.
    entries = batch if type(batch) in (tuple, list) else (batch,)
    for tensor in entries:
        if type(tensor) is not Tensor:
            return move_data_to_device(batch, device)
        if tensor.device != device and not (tensor.is_cpu and device.type == "cpu"):
            return move_data_to_device(batch, device)
    return batch
