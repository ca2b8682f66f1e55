"""Autograd graphs of one stage: one for each micro-batch between its forward and its backward.

What a stage is given are leaves, so a graph ends where the stage begins, and the gradients of these leaves are what the
stage before needs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise.pipeline.execution.suspended_step import inside_stage
from equipoise.pipeline.graph.split_backward import SplitBackward
from equipoise.pipeline.graph.stages import StageProgram, check_exchanged, map_tensors, map_values, tensors_of
from equipoise.to_device import to_device

__all__ = ["StageGraphs", "brought", "run_backward"]


class _Held(NamedTuple):
    """What a micro-batch leaves between its forward and its backward.

    Attributes:
        taken: The leaves among the inputs and what else there is of tensors.
        made: What is handed on.
        given: Of the last stage, where its backward is in two parts, what the step was given instead.
    """

    taken: list[Tensor]
    made: list[Tensor]
    given: list[Tensor | None]


class StageGraphs:
    """Runs a stage forward and backward.

    Args:
        device: Where.
        before: The device of the stage before. Default: the same.
        split: Whether backwards are in two parts, of which `weights` is the second. Default: False.
    """

    def __init__(self, device: torch.device, before: torch.device | None = None, *, split: bool = False) -> None:
        self._device, self._before, self._split = device, before or device, split
        self._held: dict[int, _Held] = {}
        self._left: dict[int, SplitBackward] = {}

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
        if not keep:
            return made
        cut = _Cut() if last and differentiable and self._split else None
        handed = made if cut is None else map_tensors(cut, made)
        ends = tensors_of(made) if not last or cut is not None else []
        self._held[index] = _Held(tensors_of(taken), ends, [] if cut is None else [cut.leaf(end) for end in ends])
        return handed

    def backward(self, index: int, gradients: Sequence[Tensor | None] | Callable[[], None]) -> list[Tensor | None]:
        """The backward of a micro-batch, or the first part of it.

        Args:
            index: Its number.
            gradients: Those of what was handed on; or what goes backward through the loss.

        Returns:
            The gradients of the tensors among the inputs.
        """
        taken, made, given = self._held.pop(index)
        found: list[Tensor | None] = [None] * len(taken)
        if callable(gradients):
            gradients()
            gradients = [None if leaf is None else leaf.grad for leaf in given]
        if self._split:
            ones = [
                None if one is None else to_device(one, end.device) for end, one in zip(made, gradients, strict=True)
            ]
            self._left[index] = SplitBackward(taken, made)
            found = self._left[index].of_inputs(ones)
        else:
            run_backward(made, gradients)
        found = [_sum(one, tensor.grad) for one, tensor in zip(found, taken, strict=True)]
        for tensor in taken:
            tensor.grad = None  # whoever keeps a graph keeps its leaves
        return found

    def weights(self, index: int) -> None:
        """The second part of a micro-batch's backward: the gradients of weights."""
        self._left.pop(index).of_weights()

    def forget(self, index: int) -> None:
        """Lets go of a micro-batch that will not go backward."""
        self._held.pop(index, None)
        self._left.pop(index, None)


class _Cut:
    """Ends graphs at an output: a step goes on with the same values, whose gradients come to a leaf."""

    def __init__(self) -> None:
        self._cut: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        """What the step is given."""
        if not tensor.requires_grad:
            return tensor
        if id(tensor) not in self._cut:
            leaf = tensor.detach().requires_grad_()
            given: Tensor = _Given.apply(leaf)  # type: ignore[no-untyped-call]
            self._cut[id(tensor)] = leaf, given
        return self._cut[id(tensor)][1]

    def leaf(self, tensor: Tensor) -> Tensor | None:
        """Where its gradient comes to, at the first of the places where an output has it."""
        leaf, _ = self._cut.pop(id(tensor), (None, None))
        return leaf


class _Given(torch.autograd.Function):
    """The same values, which may be changed in place as those of a leaf may not."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        """The same values."""
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The same gradients."""
        return gradients[0]


def run_backward(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Runs the backward of tensors whose gradients are known, where there is any to run."""
    pairs = [
        (tensor, to_device(gradient, tensor.device))
        for tensor, gradient in zip(tensors, gradients, strict=True)
        if gradient is not None and tensor.requires_grad
    ]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])


def brought(values: Any, before: torch.device, device: torch.device, take: Callable[..., Tensor] = to_device) -> Any:
    """Values of a stage for the next: its tensors brought to the device, and what names the device before renamed."""

    def each(value: Any) -> Any:
        if isinstance(value, Tensor):
            return take(value, device)
        return device if isinstance(value, torch.device) and value == before else value

    return map_values(each, values)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Gradients that came by way of the outputs, and those that came beside them, of a whole backward all of them."""
    return other if one is None else one if other is None else one + other


def _without_history(tensor: Tensor, device: torch.device) -> Tensor:
    return to_device(tensor.detach(), device)


def _leaf(tensor: Tensor, device: torch.device) -> Tensor:
    """The same values without their history, on a device, where gradients end."""
    made = to_device(tensor.detach(), device)
    return made.requires_grad_() if tensor.requires_grad else made
