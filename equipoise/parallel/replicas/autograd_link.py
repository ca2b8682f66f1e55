"""The autograd link between a module's parameters and their copies on other devices.

The copies hold their values already, so forward copies nothing. Backward sums the gradients of all copies at the
module's parameters. So `torch.autograd.grad`, a plain `loss.backward()` and second derivatives see one set of
parameters, as with `nn.DataParallel`, which copies all of them for every batch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.parallel.gradient_sums import sum_gradients
from equipoise.parallel.replicas import coalesced

__all__ = ["connect"]


def connect(
    sources: Sequence[Tensor],
    copies: Sequence[Sequence[Tensor]],
) -> list[list[Tensor]]:
    """Return the values of copies, with a graph that leads to their sources.

    Args:
        sources: Parameters, all on one device.
        copies: For each device, the copies of all of them.

    Returns:
        For each device, a tensor for each copy, in its memory. Tensors of sources that need no gradient have no graph.
    """
    trainable = []
    trainable_sources = []
    for index, source in enumerate(sources):
        if source.requires_grad:
            trainable.append(index)
            trainable_sources.append(source)

    # 1. Copies without a graph, and the trainable ones of all devices in one list.
    results = []
    values = []
    for device_copies in copies:
        tensors = [copied.detach() for copied in device_copies]
        results.append(tensors)
        for index in trainable:
            # Another object: autograd would give the one in the results a graph.
            copied = device_copies[index]
            values.append(copied.detach())

    # 2. The trainable ones with a graph.
    connected = _Connection.apply(values, *trainable_sources)  # type: ignore[no-untyped-call]
    remaining = iter(connected)
    for tensors in results:
        for index in trainable:
            tensors[index] = next(remaining)
    return results


class _Connection(torch.autograd.Function):
    """Identity for the copies in forward; sum of their gradients for the sources in backward."""

    @staticmethod
    def forward(ctx: Any, values: list[Tensor], *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.devices = [source.device for source in sources]
        ctx.set_materialize_grads(False)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        # Gradients come device by device, in the order of the sources.
        count = len(ctx.devices)
        by_source = [gradients[index::count] for index in range(count)]
        # For second derivatives the sums need a graph. Autograd's tensors must not change.
        if torch.is_grad_enabled():
            sums = list(map(sum_gradients, by_source, ctx.devices))
        else:
            sums = coalesced.add_rows(by_source, ctx.devices[0], in_place=False)
        # The list of values gets no gradient.
        return None, *sums
