"""Agreement of two values: compiled programs round differently from torch's own kernels.

Two tensors agree if no element differs by more than a share of the largest element, and a smaller share of the largest
gradient: the gradient of a bias before a BatchNorm is nothing but rounding. Captured steps run torch's own kernels:
they must agree to the bit.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["COMPARED", "EXACT", "TOLERANCES", "Tolerance", "agree", "difference_of", "largest"]


# Types of values that are compared.
COMPARED = (Tensor, int, float, str, type(None))


class Tolerance(NamedTuple):
    """Largest difference of two tensors.

    Attributes:
        relative: As a share of the largest element of the tensor.
        floor: As a share of the largest element of all gradients; for other tensors, an absolute number.
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


def agree(value: Any, other: Any, tolerance: Tolerance) -> bool:
    """Return True if two values are the same within a tolerance.

    A number may stand for a tensor of one element. Values of other types, such as metrics, are not compared.

    Args:
        value: A value.
        other: Another value.
        tolerance: The largest difference of tensors.
    """
    if not isinstance(value, COMPARED) or not isinstance(other, COMPARED):
        return True
    # 1. Numbers and texts, or tensors of different shapes.
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
    # Differences of short types would be rounded themselves.
    wide = torch.promote_types(tensor.dtype, torch.float32)
    allowed = tolerance.relative * largest([tensor]) + tolerance.floor
    wide_tensor = tensor.to(wide)
    other_wide_tensor = other_tensor.to(wide)
    return torch.allclose(wide_tensor, other_wide_tensor, rtol=0.0, atol=allowed, equal_nan=True)


def _like(value: Any, tensor: Tensor) -> Tensor | None:
    """Return a number as a tensor like another; None if it is no number."""
    if isinstance(value, Tensor):
        return value.to(tensor.device)
    if isinstance(value, int | float):
        return torch.as_tensor(value, dtype=tensor.dtype, device=tensor.device)
    return None


def largest(tensors: Any) -> float:
    """Return the largest absolute value of the finite elements of tensors; 0 without any."""
    maximum = 0.0
    for tensor in tensors:
        if tensor.numel():
            finite = torch.nan_to_num(tensor.detach(), nan=0.0, posinf=0.0, neginf=0.0)
            maximum = max(maximum, float(finite.abs().max()))
    return maximum


def difference_of(expected: Any, computed: Any) -> str:
    """Return the largest difference of two tensors as text; empty if there is none, or the shapes differ.

    Args:
        expected: A tensor, or another value.
        computed: The tensor or value that was computed in its place.
    """
    if not isinstance(expected, Tensor) or not isinstance(computed, Tensor):
        return ""
    if expected.shape != computed.shape:
        return ""
    wide = torch.promote_types(expected.dtype, torch.float32)
    reference = expected.to(wide)
    difference = largest([reference - computed.to(wide)])
    # Among zeros, the difference itself counts.
    scale = largest([reference]) or 1.0
    share = difference / scale
    if not share:
        return ""
    return f" by {share:.1e} of the largest element"
