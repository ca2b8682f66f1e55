"""Gradients that `torch.autograd.grad` returns, or that a backward gives a graph: their means over all processes.

Of the parameters of the module they are means, as a loss is that of the samples of all processes. Of any other tensor,
such as the samples, they belong to this process.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from equipoise.interop.distributed.backward_calls import BackwardCall
from equipoise.parallel.optimizers.gradient_marks import mark_exchanged
from equipoise.strategies.ddp.exchange.by_hand.digests import agree, digest
from equipoise.strategies.ddp.exchange.by_hand.means import Share, mean_of, mean_with_graph, passes_mean
from equipoise.strategies.ddp.exchange.by_hand.meetings import Kind, Meetings

__all__ = ["ReturnedGradients"]

_MEANS = (
    "`torch.autograd.grad` returns for a parameter of the module the mean over the samples of all processes. For the"
    " gradients of single samples or tasks take `torch.func.grad`, or the gradient for a copy of the parameter."
)


class ReturnedGradients:
    """Exchanges gradients that are not, or not only, in `.grad`.

    Args:
        meetings: Where the processes meet.
    """

    def __init__(self, meetings: Meetings) -> None:
        self._meetings = meetings
        # Whether a gradient was given a graph, so that other tensors may be computed from it.
        self._has_graphs = False
        self._has_told = False

    def exchange(self, call: BackwardCall, numbers: Mapping[int, int]) -> Sequence[Tensor | None]:
        """Run `torch.autograd.grad`. Return its results; those for parameters are means over all processes.

        Args:
            call: The call.
            numbers: The number of each parameter, by identity.
        """
        results: Sequence[Tensor | None] = call.run()
        # 1. Find the parameters among the inputs, and what was computed from means of their gradients: weights after a
        #    step with a graph are weights, if all processes have the same.
        inputs: list[Any] = call.leaves()
        indices = [index for index, value in enumerate(inputs) if id(value) in numbers]
        derived: list[int] = []
        if self._has_graphs:
            derived = [index for index, value in enumerate(inputs) if passes_mean(value)]
        if not indices and not derived:
            return results

        # 2. Meet, and compare.
        chosen = [numbers[id(inputs[index])] for index in indices]
        compared = [inputs[index] for index in derived]
        asked = (*chosen, len(derived), call.creates_graph)
        # A check sum, which float64 holds exactly.
        detail = zlib.crc32(repr(asked).encode())
        event = {"detail": detail, **digest(compared)}
        events, share = self._meetings.wait_for_all(Kind.GRAD, lambda: event)
        if agree(events, compared):
            indices += derived

        # 3. Exchange, and say once what that means.
        if not self._has_told:
            self._has_told = True
            rank_zero_info(_MEANS)
        gradients = [results[index] for index in indices]
        likes = [inputs[index] for index in indices]
        means = self.means(gradients, likes, share, with_graph=call.creates_graph)
        exchanged = list(results)
        for index, mean in zip(indices, means, strict=True):
            exchanged[index] = mean
        return tuple(exchanged)

    def exchange_with_graph(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make the gradients of parameters their means, through which another backward may run."""
        _, share = self._meetings.wait_for_all(Kind.BACKWARD_WITH_GRAPH)
        gradients = self.means([parameter.grad for parameter in parameters], parameters, share, with_graph=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    def means(
        self, gradients: Sequence[Tensor | None], likes: Sequence[Tensor], share: Share, *, with_graph: bool
    ) -> list[Tensor | None]:
        """Return the mean of each gradient; None for one that no process has."""
        if not gradients:
            return []
        # 1. Zeros for what this process lacks, and a note of what it has.
        filled = []
        for gradient, like in zip(gradients, likes, strict=True):
            if gradient is None:
                gradient = torch.zeros_like(like)
            filled.append(gradient)
        has_gradient = [gradient is not None for gradient in gradients]
        present = filled[0].new_tensor(has_gradient)

        # 2. The exchange.
        if with_graph:
            self._has_graphs = True
            *means, present = mean_with_graph([*filled, present], share, self._meet_again)
        else:
            *means, present = mean_of([*filled, present], share)
        mark_exchanged(means)

        # 3. None where no process has one. The note is not read from the device if this process has all.
        if all(has_gradient):
            return list(means)
        pairs = zip(means, present.tolist(), strict=True)
        return [mean if count else None for mean, count in pairs]

    def _meet_again(self) -> None:
        self._meetings.wait_for_all(Kind.SECOND_BACKWARD)
