"""Numbers that tell whether all processes have the same tensors."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise.strategies.ddp.exchange.by_hand.meetings import Event

__all__ = ["agree", "digest"]

# Rounding errors by which equal sums may differ, in parts of the sum of the absolute values.
_MOST_ROUNDINGS = 16


def digest(tensors: Sequence[Tensor]) -> dict[str, float]:
    """Return the numbers of tensors for an `Event`. It waits for the device, if there are tensors."""
    if not tensors:
        return {}
    device = tensors[0].device
    sums = []
    for index, tensor in enumerate(tensors):
        wide = tensor.detach().double()
        # Tensors in another order have another sum.
        signed = math.cos(index) * wide.sum()
        pair = torch.stack([signed, wide.abs().sum()])
        sums.append(pair.to(device))
    # All are read at once.
    total, size = torch.stack(sums).sum(0).tolist()
    return {"compared": len(tensors), "total": total, "size": size}


def agree(events: Sequence[Event], tensors: Sequence[Tensor]) -> bool:
    """Return whether the tensors of all processes are the same, but for rounding."""
    first = events[0]
    # Kernels of a GPU may add in another order.
    rounding = [torch.finfo(tensor.dtype).eps for tensor in tensors]
    tolerance = _MOST_ROUNDINGS * max(rounding, default=0.0) * first.size
    for event in events:
        is_near = abs(event.total - first.total) <= tolerance
        if event.compared != first.compared or not is_near:
            return False
    return True
