"""The autograd graphs of one stage of a pipeline: one for each micro-batch between its forward and its backward.

What a stage is given are leaves, so a graph ends where the stage begins, and the gradients of these leaves are what the
stage before needs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.parallel.micro_steps import inside_stage
from equipoise.parallel.stages import StageProgram, check_exchanged, map_tensors, map_values

__all__ = ["StageGraphs", "bring", "brought", "go_back", "tensors_in"]


class StageGraphs:
    """Runs a stage forward and backward.

    Args:
        device: Where.
        before: The device of the stage before. Default: the same.
    """

    def __init__(self, device: torch.device, before: torch.device | None = None) -> None:
        self._device, self._before = device, before or device
        self._held: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def forward(self, index: int, program: StageProgram, given: list[Any], *, keep: bool, last: bool) -> Any:
        """The forward of a micro-batch.

        Args:
            index: Its number.
            program: The stage's calls.
            given: The stage's inputs, anywhere.
            keep: Whether a backward follows.
            last: Whether what follows is the loss, so that nobody hands gradients of the outputs to `backward`.

        Raises:
            StepError: If what it hands on cannot be taken to another stage.
        """
        differentiable = torch.is_grad_enabled() and keep
        taken = brought(given, self._before, self._device, _leaf if differentiable else _without_history)
        with inside_stage():
            made = program.run(*taken)
        if not last:
            check_exchanged(made, program.outputs)
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
        found = [tensor.grad for tensor in taken]
        for tensor in taken:
            tensor.grad = None  # whoever keeps a graph keeps its leaves
        return found

    def forget(self, index: int) -> None:
        """Lets go of a micro-batch that will not go backward."""
        self._held.pop(index, None)


def go_back(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Runs the backward of tensors whose gradients are known, where there is any to run."""
    pairs = [
        (tensor, bring(gradient, tensor.device))
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


def bring(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device."""
    # A copy to the CPU that nobody waits for would be read before it is there.
    return tensor if tensor.device == device else tensor.to(device, non_blocking=device.type == "cuda")


def brought(values: Any, before: torch.device, device: torch.device, take: Callable[..., Tensor] = bring) -> Any:
    """Values of a stage for the next: its tensors brought to the device, and what names the device before renamed."""

    def each(value: Any) -> Any:
        if isinstance(value, Tensor):
            return take(value, device)
        return device if isinstance(value, torch.device) and value == before else value

    return map_values(each, values)


def _without_history(tensor: Tensor, device: torch.device) -> Tensor:
    return bring(tensor.detach(), device)


def _leaf(tensor: Tensor, device: torch.device) -> Tensor:
    """The same values without their history, on a device, where gradients end."""
    made = bring(tensor.detach(), device)
    return made.requires_grad_() if tensor.requires_grad else made
