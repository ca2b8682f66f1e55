"""The one place that decides whether a copy between devices may run asynchronously.

A copy to a CUDA device may: later work on that device is queued behind it. A copy to the CPU may not: the CPU would
read the tensor before the values have arrived.
"""

import torch
from torch import Tensor

__all__ = ["to_device"]


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
