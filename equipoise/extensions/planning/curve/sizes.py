"""Bytes of a storage as a function of the batch size, from two sizes of it."""

from collections.abc import Sequence
from typing import NamedTuple

from equipoise.memory.records import TensorRecord

__all__ = ["Growth", "Size", "Span", "is_proportional", "size_between"]


class Span(NamedTuple):
    """The two batch sizes between which lengths are compared.

    Attributes:
        first: The first batch size.
        second: The second one, larger than the first.
    """

    first: int
    second: int


class Growth(NamedTuple):
    """A length that differs between the two batch sizes.

    Attributes:
        first: The length at the first batch size.
        difference: The length at the second one, less that at the first.
    """

    first: int
    difference: int


class Size(NamedTuple):
    """Bytes of a storage: a fixed factor, times lengths that grow with the batch.

    Attributes:
        factor: Bytes of an element times all fixed lengths; all bytes if nothing grows.
        growths: The lengths that grow. Two of them make a storage that grows with the square of the batch.
    """

    factor: int
    growths: tuple[Growth, ...] = ()

    def at(self, batch_size: int, span: Span) -> int:
        """Return the bytes at a batch size."""
        nbytes = self.factor
        distance = batch_size - span.first
        distance_between = span.second - span.first
        for first, difference in self.growths:
            # A length such as half the batch is rounded down, as a program does.
            length = first + difference * distance // distance_between
            nbytes *= max(0, length)
        return nbytes


def size_between(first: TensorRecord, second: TensorRecord) -> Size:
    """Return the size of a storage from its records at two batch sizes."""
    if first.nbytes == second.nbytes:
        return Size(first.nbytes)
    lengths = _lengths(first, second)
    if lengths is None:
        # The bytes themselves are the length that grows.
        growth = Growth(first.nbytes, second.nbytes - first.nbytes)
        return Size(1, (growth,))
    growths = []
    # What the fixed lengths leave of the bytes.
    factor = first.nbytes
    for length, other in lengths:
        if length != other:
            growth = Growth(length, other - length)
            growths.append(growth)
            factor //= length
    return Size(factor, tuple(growths))


def _lengths(first: TensorRecord, second: TensorRecord) -> Sequence[tuple[int, int]] | None:
    """Return the pairs of lengths of two shapes; None if these do not explain the bytes."""
    if len(first.shape) != len(second.shape):
        return None
    pairs = list(zip(first.shape, second.shape, strict=True))
    grown = first.nbytes
    for length, other in pairs:
        if not length:
            return None
        grown = grown * other // length
    if grown != second.nbytes:
        return None
    return pairs


def is_proportional(size: Size, span: Span) -> bool:
    """Return True if every growing length is a multiple of the batch size, as lengths of samples are.

    Others, such as the number of pairs in a batch, may follow another law than the straight line through two points.

    Args:
        size: The size.
        span: The batch sizes that were compared.
    """
    distance_between = span.second - span.first
    # The straight line through both points must lead through zero.
    at_zero = []
    for first, difference in size.growths:
        at_zero.append(first * distance_between - difference * span.first)
    return not any(at_zero)
