"""The sum of a tensor's gradients from several devices or processes, some of which may have none."""

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["sum_gradients"]


def sum_gradients(gradients: Iterable[Tensor | None], device: torch.device) -> Tensor | None:
    """Return the sum of gradients in their order, on a device. With gradients enabled, the sum has a graph.

    Args:
        gradients: The gradients, of one shape; None where there is none.
        device: Device of the sum.

    Returns:
        The sum; None if there is no gradient.

    Example:
        >>> sum_gradients([torch.ones(2), None, torch.ones(2)], torch.device("cpu"))
        tensor([2., 2.])
    """
    total: Tensor | None = None
    for gradient in gradients:
        if gradient is None:
            continue
        moved = gradient.to(device)
        if total is None:
            total = moved
        else:
            total = total + moved
    return total
