"""The autograd link between a module's parameters and their copies on other devices.

The copies hold their values already, so nothing is copied on the way forward; on the way back the gradients of all
copies are summed at the module's own. So `torch.autograd.grad`, a plain `loss.backward()` and second derivatives see
one set of parameters, as with `nn.DataParallel`, which copies all of them for every batch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.parallel.replicas import coalesced

__all__ = ["connect"]


def connect(sources: Sequence[Tensor], copies: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """The values of copies, with a graph that leads to their sources.

    Args:
        sources: Parameters, all on one device.
        copies: For each device, the copies of all of them.

    Returns:
        For each device, a tensor for each copy, in its memory. Those of sources that need no gradient have no graph.
    """
    learned = [index for index, source in enumerate(sources) if source.requires_grad]
    tensors = [[copy.detach() for copy in each] for each in copies]
    flat = [each[index].detach() for each in copies for index in learned]
    connected = iter(_Connection.apply(flat, *(sources[index] for index in learned)))  # type: ignore[no-untyped-call]
    for each in tensors:
        for index in learned:
            each[index] = next(connected)
    return tensors


class _Connection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: list[Tensor], *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.home = [source.device for source in sources]
        ctx.set_materialize_grads(False)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        count = len(ctx.home)
        of_each: list[tuple[Any, ...]] = [gradients[index::count] for index in range(count)]
        if torch.is_grad_enabled():  # for second derivatives
            return None, *(_sum(of, home) for of, home in zip(of_each, ctx.home, strict=True))
        alike: dict[tuple[bool, ...], list[int]] = {}  # parameters by which of their copies have a gradient
        for index, of in enumerate(of_each):
            alike.setdefault(tuple([gradient is not None for gradient in of]), []).append(index)
        summed: list[Tensor | None] = [None] * count
        for have, indices in alike.items():
            columns = [[of_each[index][place] for index in indices] for place, it_has in enumerate(have) if it_has]
            if columns:
                # The first is written to where there are others, and what autograd hands over is not ours.
                columns[0] = [gradient.to(ctx.home[0], copy=len(columns) > 1) for gradient in columns[0]]
                for index, total in zip(indices, coalesced.reduce_add(columns), strict=True):
                    summed[index] = total
        return None, *summed


def _sum(gradients: Sequence[Tensor | None], home: torch.device) -> Tensor | None:
    """The sum of gradients at home, with a graph of its own."""
    total: Tensor | None = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient.to(home) if total is None else total + gradient.to(home)
    return total
