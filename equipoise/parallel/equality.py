"""Equality of two computations from one state: how far values are apart, and how far rounding may take them.

What is added up in another order, or by another kernel, differs in the last digits. So the largest difference of two
tensors is compared with a share of the largest element, and, for gradients, with a smaller share of the largest one of
all: the gradient of a bias before a BatchNorm is nothing but rounding. What is wrong has the size of the value itself.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "COMPARED",
    "EXACT",
    "TOLERANCES",
    "Gap",
    "Tolerance",
    "copied",
    "farthest",
    "gap_of",
    "largest",
    "tolerance_of",
]

# Types of values that are compared. Others, such as metrics, are not.
COMPARED = (Tensor, int, float, str, type(None))


class Tolerance(NamedTuple):
    """Largest difference of two tensors that is allowed: the sum of two parts.

    Attributes:
        relative: As a share of the largest element of the tensor.
        floor: As a share of the largest element of all gradients; for other tensors, an absolute number.
    """

    relative: float
    floor: float

    def of_gradients(self, gradients: Iterable[Tensor | None]) -> "Tolerance":
        """Return the tolerance of one gradient among all."""
        size = largest(gradient for gradient in gradients if gradient is not None)
        return self._replace(floor=self.floor * size)


# By the dtype of the computation.
TOLERANCES = {
    torch.float64: Tolerance(1e-9, 1e-12),
    torch.float32: Tolerance(1e-3, 1e-5),
    torch.float16: Tolerance(2e-2, 2e-3),
    torch.bfloat16: Tolerance(1e-1, 1e-2),
}
EXACT = Tolerance(0.0, 0.0)


def tolerance_of(dtypes: Iterable[torch.dtype]) -> Tolerance:
    """Return the tolerance of a computation in some dtypes, the widest of theirs; that of float32 without any."""
    usual = TOLERANCES[torch.float32]
    return max((TOLERANCES.get(dtype.to_real(), usual) for dtype in dtypes), default=usual)


class Gap(NamedTuple):
    """A difference of two values, which is true if it is larger than allowed.

    Attributes:
        excess: The difference in parts of the largest one that is allowed; infinite for values of other shapes.
        share: The difference in parts of the largest expected element.
        place: The index of the largest difference. Default: none, for values that are no tensors.
    """

    excess: float
    share: float
    place: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        """Return whether the difference is larger than allowed."""
        return self.excess > 1

    def __str__(self) -> str:
        """Return the difference as the end of a sentence; empty for values of other shapes or kinds."""
        if self.share == float("inf"):
            return ""
        return f" by {self.share:.1e} of the largest element"


# That of values of other kinds, shapes or contents that have no distance, and that of equal ones.
_INCOMPARABLE = Gap(float("inf"), float("inf"))
_NONE = Gap(0.0, 0.0)


def gap_of(expected: Any, computed: Any, tolerance: Tolerance = EXACT) -> Gap:
    """Return how far a value is from the expected one.

    NaN equals NaN, and an infinity itself. A number may stand for a tensor of one element.

    Args:
        expected: A tensor, a number or a text. Values of other types, such as metrics, are not compared.
        computed: The value that was computed in its place.
        tolerance: The largest difference of tensors of floating point. Default: none.

    Example:
        >>> gap = gap_of(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0]), TOLERANCES[torch.float32])
        >>> bool(gap), gap.share, gap.place
        (True, 0.25, (1,))
    """
    if not isinstance(expected, COMPARED) or not isinstance(computed, COMPARED):
        return _NONE
    # 1. Numbers and texts.
    tensor = expected if isinstance(expected, Tensor) else computed
    if not isinstance(tensor, Tensor):
        are_equal = type(expected) is type(computed) and expected == computed
        return _NONE if are_equal else _INCOMPARABLE
    # 2. Tensors, or a tensor and a number.
    left = _like(expected, tensor)
    right = _like(computed, tensor)
    if left is None or right is None or left.shape != right.shape:
        return _INCOMPARABLE
    if not left.numel():
        return _NONE
    return _gap_of_tensors(left.to_dense(), right.to_dense(), tolerance)


def _gap_of_tensors(left: Tensor, right: Tensor, tolerance: Tolerance) -> Gap:
    """Return how far two dense tensors of one shape are apart."""
    if not left.is_floating_point() and not left.is_complex():
        return _NONE if torch.equal(left, right) else _INCOMPARABLE
    # Differences of short types would be rounded themselves.
    wide = torch.promote_types(left.dtype, torch.float32)
    left = left.to(wide)
    right = right.to(wide)
    is_same = (left == right) | (left.isnan() & right.isnan())
    distance, position = farthest(left, right, is_same)
    if distance < 0:
        return _NONE
    size = largest([left])
    allowed = tolerance.relative * size + tolerance.floor
    excess = distance / allowed if allowed else float("inf")
    # Among zeros, the difference itself counts.
    share = distance / (size or 1.0)
    place = tuple(int(index) for index in torch.unravel_index(torch.tensor(position), left.shape))
    return Gap(excess, share, place)


def farthest(left: Tensor, right: Tensor, is_same: Tensor) -> tuple[float, int]:
    """Return the largest distance of two elements, infinite beside a NaN and -1 if all are the same, and its position.

    Args:
        left: A tensor.
        right: Another of its shape.
        is_same: Which elements are equal.
    """
    distances = (left - right).abs().nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(is_same, -1)
    position = int(distances.argmax())
    return float(distances.flatten()[position]), position


def _like(value: Any, tensor: Tensor) -> Tensor | None:
    """Return a number as a tensor like another; None if it is no number."""
    if isinstance(value, Tensor):
        return value.detach().to(tensor.device)
    if isinstance(value, int | float):
        return torch.as_tensor(value, dtype=tensor.dtype, device=tensor.device)
    return None


def largest(tensors: Iterable[Tensor]) -> float:
    """Return the largest absolute value of the finite elements of tensors; 0 without any."""
    maximum = 0.0
    for tensor in tensors:
        if tensor.numel():
            finite = torch.nan_to_num(tensor.detach().to_dense(), nan=0.0, posinf=0.0, neginf=0.0)
            maximum = max(maximum, float(finite.abs().max()))
    return maximum


def copied(leaf: Any) -> Any:
    """Return a leaf of a nested value in memory of its own: the next computation may change it."""
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
