"""Coalesced exchanges between replicas: parameters to all of them, gradients to the first.

Between distinct CUDA devices many small tensors travel in few large messages; elsewhere each is copied by itself.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.cuda import comm

from equipoise.interop.torch import foreach
from equipoise.to_device import to_device

__all__ = ["broadcast", "reduce_add"]


def broadcast(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[Sequence[Tensor]]:
    """The tensors for each device, to be copied from.

    Args:
        tensors: All on one device.
        devices: Where they are wanted.
    """
    if tensors and _distinct([tensors[0].device, *devices]):
        all_devices, copy_to = [tensors[0].device, *devices], comm.broadcast_coalesced
        detached = [tensor.detach() for tensor in tensors]
        copies: list[list[Tensor]] = copy_to(detached, all_devices)  # type: ignore[no-untyped-call]
        return [*copies[1:]]
    return [tensors for _ in devices]


def reduce_add(tensors: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
    """The sums, on the device of the first list; without coalescing they are written into that list.

    Args:
        tensors: Lists of equal length, each on one device.
    """
    first, *others = tensors
    if not first or not others:
        return first
    home = first[0].device
    if _distinct([each[0].device for each in tensors]) and not any(tensor.is_sparse for tensor in first):
        summed: list[Tensor] = comm.reduce_add_coalesced(tensors, home.index)  # type: ignore[no-untyped-call]
        return summed
    for other in others:
        foreach.add_(list(first), [to_device(tensor, home) for tensor in other])
    return first


def _distinct(devices: Sequence[torch.device]) -> bool:
    """Whether these are different CUDA devices."""
    return all(device.type == "cuda" for device in devices) and len(set(devices)) == len(devices)
