"""The autograd graphs of one stage of a pipeline: one for each micro-batch between its forward and its backward.

What a stage is given are leaves, so a graph ends where the stage begins, and the gradients of these leaves are what the
stage before needs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.parallel.stages import map_tensors

__all__ = ["StageGraphs", "go_back", "tensors_in"]


class StageGraphs:
    """Runs a stage forward and backward.

    Args:
        run: The stage; takes its inputs and returns what it hands on.
        device: Where.
    """

    def __init__(self, run: Callable[..., Any], device: torch.device) -> None:
        self._run, self._device = run, device
        self._held: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def forward(self, index: int, given: list[Any], *, keep: bool, last: bool) -> Any:
        """The forward of a micro-batch.

        Args:
            index: Its number.
            given: The stage's inputs, anywhere.
            keep: Whether a backward follows.
            last: Whether what follows is the loss, so that nobody hands gradients of the outputs to `backward`.
        """
        differentiable = torch.is_grad_enabled() and keep
        taken = map_tensors(lambda tensor: _leaf(tensor, self._device, differentiable=differentiable), given)
        made = self._run(*taken)
        if keep:
            self._held[index] = (tensors_in(taken), [] if last else tensors_in(made))
        return made

    def backward(self, index: int, gradients: Sequence[Tensor | None] | Callable[[], None]) -> list[Tensor | None]:
        """The backward of a micro-batch.

        Args:
            index: Its number.
            gradients: Those of what was handed on; or what goes backward through the loss.

        Returns:
            The gradients of the tensors among the inputs.
        """
        taken, made = self._held.pop(index)
        if callable(gradients):
            gradients()
        else:
            go_back(made, gradients)
        return [tensor.grad for tensor in taken]

    def forget(self, index: int) -> None:
        """Lets go of a micro-batch that will not go backward."""
        self._held.pop(index, None)


def go_back(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Runs the backward of tensors whose gradients are known, where there is any to run."""
    pairs = [
        (tensor, gradient.to(tensor.device, non_blocking=True))
        for tensor, gradient in zip(tensors, gradients, strict=True)
        if gradient is not None and tensor.requires_grad
    ]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in tuples, lists and dictionaries, in order."""
    found: list[Tensor] = []
    map_tensors(found.append, value)
    return found


def _leaf(tensor: Tensor, device: torch.device, *, differentiable: bool) -> Tensor:
    """The same values without their history, on a device."""
    made = tensor.detach()
    made = made if made.device == device else made.to(device, non_blocking=True)
    return made.requires_grad_() if differentiable and tensor.requires_grad else made
