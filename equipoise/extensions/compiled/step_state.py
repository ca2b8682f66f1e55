"""The state after a step, for the comparison of a compiled or captured step with the step itself.

The two are computed from the same state. Compared are the loss, the outputs, the gradients, the logged values, the
buffers, and the states of the generators.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from equipoise.extensions.compiled.comparison.agreement import COMPARED, Tolerance, agree, largest
from equipoise.parallel.snapshot import random_state
from equipoise.tree import leaves_of

__all__ = ["StepState"]


class StepState:
    """Results of a step, and the state of the module and the generators after it.

    Args:
        module: The module, after the step.
        loss: The loss.
        outputs: The return value of the step.
        logged: Name and value of what it logged.
    """

    def __init__(self, module: nn.Module, loss: Tensor, outputs: Any, logged: Sequence[tuple[str, Any]]) -> None:
        self._loss = loss.detach().clone()
        self._outputs = _compared_leaves(outputs)
        self._logged = [(name, _detached(value)) for name, value in logged]
        self._gradients = {name: _detached(parameter.grad) for name, parameter in module.named_parameters()}
        self._buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        self._generators = random_state.capture()

    def first_difference(self, compiled: "StepState", tolerance: Tolerance) -> str | None:
        """Return what the compiled step computes otherwise than this one; None if they agree.

        Args:
            compiled: The state of the compiled step.
            tolerance: The largest difference of tensors.
        """
        # 1. The loss and the gradients.
        if not agree(self._loss, compiled._loss, tolerance):
            return f"the loss is {compiled._loss.item():.8g} and not {self._loss.item():.8g}"
        scale = largest(gradient for gradient in self._gradients.values() if gradient is not None)
        floor = Tolerance(tolerance.relative, tolerance.floor * scale)
        for name, gradient in self._gradients.items():
            if not agree(gradient, compiled._gradients[name], floor):
                return f"the gradient of {name} differs"

        # 2. The buffers and the outputs.
        for name, buffer in self._buffers.items():
            if not agree(buffer, compiled._buffers.get(name), tolerance):
                return f"the buffer {name} differs"
        if not _all_agree(self._outputs, compiled._outputs, tolerance):
            return "the outputs are others"

        # 3. The logged values, and the random numbers.
        names = [name for name, _ in self._logged]
        compiled_names = [name for name, _ in compiled._logged]
        if names != compiled_names:
            return "other values are logged"
        for logged, compiled_logged in zip(self._logged, compiled._logged, strict=True):
            name, value = logged
            if not agree(value, compiled_logged[1], tolerance):
                return f"the logged value {name!r} differs"
        if not self._generators.equals(compiled._generators):
            return "it draws random numbers otherwise"
        return None


def _compared_leaves(outputs: Any) -> list[Any]:
    """Return the tensors, numbers and texts of outputs, the tensors detached."""
    leaves = []
    for leaf in leaves_of(outputs):
        if isinstance(leaf, COMPARED):
            leaves.append(_detached(leaf))
    return leaves


def _detached(value: Any) -> Any:
    """Return a copy of a tensor without its graph; other values as they are."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value


def _all_agree(values: Sequence[Any], others: Sequence[Any], tolerance: Tolerance) -> bool:
    """Return True if two lists are equally long, and their values agree."""
    if len(values) != len(others):
        return False
    pairs = zip(values, others, strict=True)
    return all(agree(value, other, tolerance) for value, other in pairs)
