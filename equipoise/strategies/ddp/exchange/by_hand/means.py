"""The weighted mean of tensors over all processes, which has a gradient: again the mean.

A gradient g = Σ wᵢgᵢ / Σ wᵢ enters what process j computes next, whose own gradient for g is vⱼ. The loss of the whole
batch is Σ wⱼLⱼ / Σ wⱼ, so its gradient for gᵢ is wᵢ/Σw · Σ wⱼvⱼ/Σw. The exchange of the last gradients multiplies by
wᵢ/Σw, and what remains for process i is the mean of the vⱼ.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Share", "mean_of", "mean_with_graph", "passes_mean"]


class Share(NamedTuple):
    """The weight of this process in a mean.

    Attributes:
        factor: The factor of its tensors.
        total: The sum of the factors of all processes.
    """

    factor: float
    total: float


def mean_of(tensors: Sequence[Tensor], share: Share) -> list[Tensor]:
    """Return the mean of each tensor over all processes, as new tensors.

    Args:
        tensors: Tensors of the same shapes in all processes.
        share: The weight of this process.
    """
    # 1. Tensors that travel together, in the same order in all processes.
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.device), []).append(index)

    # 2. Their means. Each is memory of its own, which the user may change in place.
    means = list(tensors)
    for group in groups.values():
        flat = torch.cat([tensors[index].reshape(-1) for index in group])
        flat.mul_(share.factor)
        dist.all_reduce(flat)
        flat.mul_(1 / share.total)
        sizes = [tensors[index].numel() for index in group]
        for index, piece in zip(group, torch.split(flat, sizes), strict=True):
            means[index] = piece.view(tensors[index].shape).clone()
    return means


def mean_with_graph(tensors: Sequence[Tensor], share: Share, meet: Callable[[], None]) -> list[Tensor]:
    """Return the mean of each tensor over all processes, through which a backward runs.

    Args:
        tensors: Tensors of the same shapes in all processes.
        share: The weight of this process.
        meet: Called before the mean of a backward, which all processes compute together.
    """
    # A process whose tensors have no graph takes part in the backward of the others.
    anchor = torch.zeros((), requires_grad=True)
    means = _Mean.apply(share, meet, anchor, *tensors)  # type: ignore[no-untyped-call]
    return list(means)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Share, meet: Callable[[], None], anchor: Tensor, *tensors: Tensor) -> Any:
        ctx.exchange = share, meet
        return tuple(mean_of(tensors, share))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        share, meet = ctx.exchange
        meet()
        # A gradient of a gradient of a gradient.
        if torch.is_grad_enabled():
            means = mean_with_graph(gradients, share, meet)
        else:
            means = mean_of(gradients, share)
        return None, None, None, *means


def passes_mean(tensor: Any) -> bool:
    """Return whether a tensor was computed from a mean of `mean_with_graph`."""
    nodes = [getattr(tensor, "grad_fn", None)]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if node.name() == "_MeanBackward":
            return True
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
    return False
