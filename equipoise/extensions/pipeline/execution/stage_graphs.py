"""Autograd graphs of one stage: one for each micro-batch between its forward and its backward.

The inputs of a stage are leaves. So a graph ends where the stage begins, and the gradients of these leaves are those
that the stage before needs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise.extensions.pipeline.execution.suspended_step import inside_stage
from equipoise.extensions.pipeline.graph.split_backward import SplitBackward
from equipoise.extensions.pipeline.graph.stages import (
    StageProgram,
    check_exchanged,
    map_tensors,
    map_values,
    tensors_of,
)
from equipoise.parallel.gradient_sums import sum_gradients
from equipoise.to_device import to_device

__all__ = ["StageGraphs", "move_values", "run_backward"]


class _Pending(NamedTuple):
    """Tensors of a micro-batch between its forward and its backward.

    Attributes:
        inputs: All input tensors; those that require gradients are leaves.
        outputs: Tensors at which the backward begins. Empty if it begins at the loss.
        leaves: For each output of the last stage, if its backward is split, the leaf that receives its gradient.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    leaves: list[Tensor | None]


class StageGraphs:
    """Runs a stage forward and backward.

    Args:
        device: Device of the stage.
        before: Device of the stage before. Default: the same device.
        split: Whether backwards have two halves, of which `weights` is the second. Default: False.
    """

    def __init__(
        self,
        device: torch.device,
        before: torch.device | None = None,
        *,
        split: bool = False,
    ) -> None:
        self.device = device
        self._device_before = before or device
        self._split = split
        # By the indices of micro-batches.
        self._pending: dict[int, _Pending] = {}
        self._second_halves: dict[int, SplitBackward] = {}

    def forward(
        self,
        index: int,
        program: StageProgram,
        inputs: list[Any],
        *,
        keep: bool,
        last: bool,
    ) -> Any:
        """Return the outputs of the stage for a micro-batch.

        Args:
            index: Index of the micro-batch.
            program: The stage's calls.
            inputs: The stage's inputs, on any device.
            keep: Whether a backward follows.
            last: Whether the loss follows, whose backward provides the gradients of the outputs.

        Raises:
            StepError: If another stage cannot take an output.
        """
        # 1. Compute.
        needs_graph = torch.is_grad_enabled() and keep
        detach = _leaf if needs_graph else _without_history
        stage_inputs = move_values(inputs, self._device_before, self.device, detach)
        with inside_stage():
            outputs = program.run(*stage_inputs)
        if not last:
            check_exchanged(outputs, program.outputs)
        if not keep:
            return outputs

        # 2. Keep what the backward needs.
        input_tensors = tensors_of(stage_inputs)
        if not last:
            self._pending[index] = _Pending(input_tensors, tensors_of(outputs), [])
            return outputs
        if not (needs_graph and self._split):
            # The backward of the loss passes through this stage.
            self._pending[index] = _Pending(input_tensors, [], [])
            return outputs

        # 3. The backward of this stage is split, so that of the loss must end at the outputs.
        cut = _OutputCut()
        outputs_of_step = map_tensors(cut, outputs)
        ends = tensors_of(outputs)
        self._pending[index] = _Pending(input_tensors, ends, [cut.take_leaf(end) for end in ends])
        return outputs_of_step

    def backward(self, index: int, gradients: Sequence[Tensor | None] | Callable[[], None]) -> list[Tensor | None]:
        """Run the backward of a micro-batch, or the first half of it.

        Args:
            index: Index of the micro-batch.
            gradients: Gradients of the outputs; of the last stage the backward of the loss.

        Returns:
            The gradients of the input tensors.
        """
        # 1. Run the backward of the loss.
        inputs, outputs, leaves = self._pending.pop(index)
        if callable(gradients):
            gradients()
            gradients = [None if leaf is None else leaf.grad for leaf in leaves]

        # 2. Run that of the stage. A full backward stores gradients in the leaves.
        input_gradients: list[Tensor | None] = [None] * len(inputs)
        if self._split:
            halves = SplitBackward(inputs, outputs)
            self._second_halves[index] = halves
            input_gradients = halves.of_inputs(_moved_to(gradients, outputs))
        else:
            run_backward(outputs, gradients)

        # 3. Add what the first half does not see: gradients that reach a leaf otherwise than through the outputs.
        sums = []
        for gradient, tensor in zip(input_gradients, inputs, strict=True):
            sums.append(sum_gradients([gradient, tensor.grad], tensor.device))
        for tensor in inputs:
            # A user who keeps the graph keeps its leaves.
            tensor.grad = None
        return sums

    def weights(self, index: int) -> None:
        """Run the second half of a micro-batch's backward: the gradients of weights."""
        self._second_halves.pop(index).of_weights()

    def forget(self, index: int) -> None:
        """Drop the graph of a micro-batch whose backward will not run."""
        self._pending.pop(index, None)
        self._second_halves.pop(index, None)


class _OutputCut:
    """Ends graphs at outputs: a step continues with the same values, whose gradients a leaf receives."""

    def __init__(self) -> None:
        # By the identity of an output its leaf, and the tensor of the step.
        self._cuts: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, output: Tensor) -> Tensor:
        """Return the tensor with which the step continues."""
        if not output.requires_grad:
            return output
        if id(output) not in self._cuts:
            leaf = output.detach().requires_grad_()
            alias: Tensor = _Alias.apply(leaf)  # type: ignore[no-untyped-call]
            self._cuts[id(output)] = (leaf, alias)
        _, alias = self._cuts[id(output)]
        return alias

    def take_leaf(self, output: Tensor) -> Tensor | None:
        """Return the leaf that receives the gradient, for the first occurrence of an output; None for later ones."""
        leaf, _ = self._cuts.pop(id(output), (None, None))
        return leaf


class _Alias(torch.autograd.Function):
    """The same values as a leaf, which the user may change in place, unlike a leaf's."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        """Return the same values."""
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the same gradients."""
        return gradients[0]


def run_backward(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Run the backward of tensors from their gradients.

    Args:
        tensors: The tensors. Those that require no gradients are skipped.
        gradients: Their gradients, on any device; None: no gradient.
    """
    roots = []
    root_gradients = []
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if gradient is not None and tensor.requires_grad:
            roots.append(tensor)
            root_gradients.append(to_device(gradient, tensor.device))
    if roots:
        torch.autograd.backward(roots, root_gradients)


def move_values(
    values: Any,
    before: torch.device,
    device: torch.device,
    move: Callable[..., Tensor] = to_device,
) -> Any:
    """Return the outputs of a stage on the device of the next.

    Args:
        values: Nested values.
        before: Device of the stage before. A value that names this device names the new one afterwards.
        device: The new device.
        move: Returns a tensor on a device. Default: `to_device`.
    """

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return move(value, device)
        if isinstance(value, torch.device) and value == before:
            return device
        return value

    return map_values(moved, values)


def _moved_to(gradients: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    moved: list[Tensor | None] = []
    for gradient, tensor in zip(gradients, tensors, strict=True):
        if gradient is not None:
            gradient = to_device(gradient, tensor.device)
        moved.append(gradient)
    return moved


def _without_history(tensor: Tensor, device: torch.device) -> Tensor:
    return to_device(tensor.detach(), device)


def _leaf(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the same values on a device, as a leaf if the tensor requires gradients."""
    leaf = to_device(tensor.detach(), device)
    if tensor.requires_grad:
        leaf.requires_grad_()
    return leaf
