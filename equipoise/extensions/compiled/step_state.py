"""The state after a step, for the comparison of a compiled or captured step with the step itself.

The two are computed from the same state. Compared are the loss, the outputs, the gradients, the logged values, the
buffers, and the states of the generators.

Kernels of the compiler round otherwise than torch's own. Two tensors agree if no element differs by more than a share
of the largest element, and a smaller share of the largest gradient: the gradient of a bias before a BatchNorm is
nothing but rounding. Captured steps run torch's own kernels: they must agree to the bit.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equipoise.parallel.snapshot import random_state
from equipoise.tree import leaves_of

__all__ = ["EXACT", "TOLERANCES", "StepState", "Tolerance", "agree"]


# Types of values that are compared.
_COMPARED = (Tensor, int, float, str, type(None))


class Tolerance(NamedTuple):
    """Largest difference of two tensors.

    Attributes:
        relative: In parts of the largest element of the tensor.
        floor: In parts of the largest element of all gradients; for other tensors, an absolute number.
    """

    relative: float
    floor: float


# By the dtype of the computation.
TOLERANCES = {
    torch.float64: Tolerance(1e-9, 1e-12),
    torch.float32: Tolerance(1e-4, 1e-6),
    torch.bfloat16: Tolerance(5e-2, 1e-2),
    torch.float16: Tolerance(1e-2, 1e-3),
}


# The same to the bit.
EXACT = Tolerance(0.0, 0.0)


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
        largest = _largest(gradient for gradient in self._gradients.values() if gradient is not None)
        floor = Tolerance(tolerance.relative, tolerance.floor * largest)
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
        if isinstance(leaf, _COMPARED):
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


def agree(value: Any, other: Any, tolerance: Tolerance) -> bool:
    """Return True if two values are the same within a tolerance.

    A number may stand for a tensor of one element. Values of other types, such as metrics, are not compared.

    Args:
        value: A value.
        other: Another value.
        tolerance: The largest difference of tensors.
    """
    if not isinstance(value, _COMPARED) or not isinstance(other, _COMPARED):
        return True
    # 1. Two values of Python, or tensors of another form.
    tensor: Tensor | None
    if isinstance(value, Tensor):
        tensor = value
        other_tensor = _like(other, value)
    elif isinstance(other, Tensor):
        tensor = _like(value, other)
        other_tensor = other
    else:
        return type(value) is type(other) and value == other
    if tensor is None or other_tensor is None or tensor.shape != other_tensor.shape:
        return False

    # 2. Two tensors.
    if not tensor.is_floating_point() and not tensor.is_complex():
        return bool((tensor == other_tensor).all())
    if not tensor.numel():
        return True
    wide = torch.promote_types(tensor.dtype, torch.float32)
    allowed = tolerance.relative * _largest([tensor]) + tolerance.floor
    return torch.allclose(tensor.to(wide), other_tensor.to(wide), rtol=0.0, atol=allowed, equal_nan=True)


def _like(value: Any, tensor: Tensor) -> Tensor | None:
    """Return a number as a tensor like another; None if it is no number."""
    if isinstance(value, Tensor):
        return value.to(tensor.device)
    if isinstance(value, int | float):
        return torch.as_tensor(value, dtype=tensor.dtype, device=tensor.device)
    return None


def _largest(tensors: Any) -> float:
    """Return the largest absolute value of the finite elements of tensors; 0 without any."""
    largest = 0.0
    for tensor in tensors:
        if tensor.numel():
            finite = torch.nan_to_num(tensor.detach(), nan=0.0, posinf=0.0, neginf=0.0)
            largest = max(largest, float(finite.abs().max()))
    return largest
