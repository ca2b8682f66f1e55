"""Numbers that tell whether all processes have the same tensors."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise.strategies.ddp.exchange.by_hand.meetings import Event

__all__ = ["agree", "digest"]


def digest(tensors: Sequence[Tensor]) -> dict[str, float]:
    """Return the numbers of tensors for an `Event`. It waits for the device, if there are tensors."""
    if not tensors:
        return {}
    numbers = []
    for index, tensor in enumerate(tensors):
        wide = tensor.detach().double()
        # Tensors in another order have another sum.
        numbers.append(torch.stack([math.cos(index) * wide.sum(), wide.abs().sum()]).to(tensors[0].device))
    total, size = torch.stack(numbers).sum(0).tolist()
    return {"compared": len(tensors), "total": total, "size": size}


def agree(events: Sequence[Event], tensors: Sequence[Tensor]) -> bool:
    """Return whether the tensors of all processes are the same, but for rounding."""
    first = events[0]
    rounding = max((torch.finfo(tensor.dtype).eps for tensor in tensors), default=0.0)
    tolerance = 16 * rounding * first.size
    return all(event.compared == first.compared and abs(event.total - first.total) <= tolerance for event in events)
