"""Copies of the first process's tensors in all processes of torch's default group."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.parallel.communication.process_group import host_group

__all__ = ["copy_from_first"]


def copy_from_first(tensors: Iterable[Tensor]) -> None:
    """Copy the values of rank 0 to all processes.

    Args:
        tensors: Parameters or buffers, the same in all processes.
    """
    with torch.no_grad():
        for tensor in tensors:
            # The default group may exchange tensors on devices alone.
            group = None
            if tensor.device.type == "cpu":
                group = host_group()
            # A broadcast needs contiguous memory; where that is a copy, the values are copied back.
            contiguous = tensor.detach().contiguous()
            dist.broadcast(contiguous, 0, group=group)
            if contiguous.data_ptr() != tensor.data_ptr():
                tensor.copy_(contiguous)
