"""The largest difference of two tensors, read piece by piece."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.errors import CheckpointError
from equipoise.parallel.equality import farthest

__all__ = ["Gap", "Pieces", "Tolerance", "largest_gap"]

Pieces = Iterable[Tensor]
"""The values of a tensor in order, in tensors of any shape."""

# Elements that are compared at once.
_ELEMENTS = 1 << 20


class Tolerance(NamedTuple):
    """Distances that two values may be apart, as for `torch.isclose`; if both are 0, their bits must be equal."""

    atol: float
    rtol: float


class Gap(NamedTuple):
    """The largest difference of two tensors.

    Attributes:
        position: The index among all elements.
        first: The first value there, as text.
        second: The second value.
        amount: The absolute difference; infinite beside a NaN.
    """

    position: int
    first: str
    second: str
    amount: float

    @property
    def finite_amount(self) -> float | None:
        """The difference; None if it is infinite."""
        if math.isfinite(self.amount):
            return self.amount
        return None


def largest_gap(first: Pieces, second: Pieces, count: int, tolerance: Tolerance) -> Gap | None:
    """Return the largest difference of two tensors; None if they are equal. NaN equals NaN.

    Args:
        first: The first tensor.
        second: The second, which may be divided in another way.
        count: Elements of each.
        tolerance: The largest difference of equal values.

    Raises:
        CheckpointError: If the pieces have another number of elements, as those of a damaged file.
    """
    gaps = []
    begin = 0
    for left, right in _aligned(first, second):
        gap = _gap_of_pieces(left, right, begin, tolerance)
        if gap is not None:
            gaps.append(gap)
        begin += len(left)
    if begin != count:
        raise CheckpointError("The values of a tensor are not as many as its shape says: a file is damaged.")
    # Of several that are equally large, the first.
    return max(gaps, key=lambda gap: gap.amount, default=None)


def _aligned(first: Pieces, second: Pieces) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the elements of both in flat pieces of one size, up to the end of one."""
    iterators = (iter(first), iter(second))
    rests = [torch.empty(0), torch.empty(0)]
    while True:
        # 1. Read where nothing is left.
        for side, iterator in enumerate(iterators):
            while not len(rests[side]):
                piece = next(iterator, None)
                if piece is None:
                    return
                rests[side] = piece.detach().reshape(-1)

        # 2. Cut off what both have. Slices take no memory.
        left, right = rests
        size = min(_ELEMENTS, len(left), len(right))
        yield left[:size], right[:size]
        rests = [left[size:], right[size:]]


def _gap_of_pieces(first: Tensor, second: Tensor, begin: int, tolerance: Tolerance) -> Gap | None:
    # 1. Bits. Most often all are equal.
    of_one_dtype = first.dtype == second.dtype
    bits = first.view(torch.uint8)
    other_bits = second.view(torch.uint8)
    if of_one_dtype and torch.equal(bits, other_bits):
        return None

    # 2. Elements.
    wide = torch.float64
    if first.is_complex() or second.is_complex():
        wide = torch.complex128
    left = first.to(wide)
    right = second.to(wide)
    same = left == right
    if of_one_dtype:
        # Large whole numbers may be equal as float64 only, and so are zeros with different signs.
        same = (bits == other_bits).reshape(len(first), -1).all(1)
    same |= left.isnan() & right.isnan()
    if any(tolerance):
        same |= torch.isclose(left, right, rtol=tolerance.rtol, atol=tolerance.atol)

    # 3. The largest difference.
    amount, index = farthest(left, right, same)
    if amount < 0:
        return None
    return Gap(begin + index, str(left[index].item()), str(right[index].item()), amount)
