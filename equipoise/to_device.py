"""Copies between devices: the one place that decides whether they may be asynchronous.

A copy to a CUDA device may: later work on that device is queued behind it. A copy to the CPU may not: the CPU would
read the tensor before the values have arrived.
"""

from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

__all__ = ["ArrivingValue", "copy_batch", "to_device"]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor with the same values on `device`; the tensor itself if it is there already.

    Args:
        tensor: A tensor on any device.
        device: The destination. A copy to the CPU waits for its values.

    Example:
        >>> to_device(torch.ones(2), torch.device("cpu"))
        tensor([1., 1.])
    """
    if tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=device.type == "cuda")


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


class ArrivingValue:
    """A number on its way from a device to the host.

    The copy is asynchronous, and only `read(wait=True)` waits for it.

    Args:
        tensor: A tensor of one element. It may change afterwards.

    Example:
        >>> ArrivingValue(torch.tensor(0.5)).read()
        0.5
    """

    def __init__(self, tensor: Tensor) -> None:
        # Pinned memory makes the copy asynchronous; the event marks its end.
        tensor = tensor.detach().reshape(())
        self._copy = torch.empty((), dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._copy.copy_(tensor, non_blocking=tensor.is_cuda)
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._event = torch.cuda.current_stream(tensor.device).record_event()

    def read(self, *, wait: bool = False) -> float | None:
        """Return the number; None if it has not arrived yet.

        Args:
            wait: Wait until it has arrived. Default: False.
        """
        if self._event is not None:
            if wait:
                self._event.synchronize()
            elif not self._event.query():  # type: ignore[no-untyped-call]
                return None
        return float(self._copy)
