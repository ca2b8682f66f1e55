"""Compare two outputs of a network: structure, values and graphs."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise import tree
from equipoise.extensions.pipeline.graph.output_structure import structure_of
from equipoise.interop.torch.dispatch import tensors_in
from equipoise.parallel.equality import gap_of, tolerance_of
from equipoise.precision import wide_dtype

__all__ = ["Output", "fingerprints_of"]


# Functions that are not counted: parameters may be looked up twice, and casts may be cached.
_NOT_COUNTED = {"torch::autograd::AccumulateGrad", "ToCopyBackward0"}


class Output:
    """Output of a computation: its structure, its tensors, and the connections of its graph.

    Args:
        value: The value. Its graph is not kept.
        with_graph: True if two outputs agree only if their graphs have the same connections.
    """

    def __init__(self, value: Any, *, with_graph: bool) -> None:
        tensors = list(tree.tensors_in(value))
        self._structure = (structure_of(value), [(tensor.shape, tensor.requires_grad) for tensor in tensors])
        self._connections: Counter[tuple[str, str]] = Counter()
        if with_graph:
            self._connections = _connections_of(tensors)
        self._tensors = [tensor.detach() for tensor in tensors]

    def agrees(self, other: "Output") -> bool:
        """Return True if another output is the same, within rounding."""
        if self._structure != other._structure:
            return False
        if self._connections != other._connections:
            return False
        # Small values may come from large ones that cancel out, so the largest value sets the scale.
        return not any(
            gap_of(expected, tensor, tolerance_of([expected.dtype])._replace(floor=0.0))
            for tensor, expected in zip(self._tensors, other._tensors, strict=True)
        )


def _connections_of(tensors: Sequence[Tensor]) -> Counter[tuple[str, str]]:
    """Count the connections in the graph of tensors by the names of the functions at both ends."""
    counts: Counter[tuple[str, str]] = Counter()
    visited = set()
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while waiting:
        function = waiting.pop()
        if function in visited:
            continue
        visited.add(function)
        for next_function, _ in function.next_functions:
            if next_function is None:
                continue
            waiting.append(next_function)
            names = (function.name(), next_function.name())
            if _NOT_COUNTED.isdisjoint(names):
                counts[names] += 1
    return counts


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(wide_dtype(tensor.device))


def fingerprints_of(value: Any) -> list[Any]:
    """Return for each tensor its shape and sums, which tell its values from those of others.

    Args:
        value: A nested value. Tensors on the meta device have no values, and no fingerprint.
    """
    fingerprints = []
    with torch.no_grad():
        for tensor in tensors_in(value):
            if tensor.device.type == "meta":
                continue
            values = _wide(_plain(tensor))
            total = values.sum().item()
            absolute_total = values.abs().sum().item()
            # The text of NaN equals itself, unlike NaN.
            fingerprints.append((tuple(tensor.shape), repr(total), repr(absolute_total)))
    return fingerprints
