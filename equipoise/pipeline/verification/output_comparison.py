"""Compare two outputs of a network: structure, values and graphs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.interop.torch.dispatch import tensors_in

__all__ = ["Output", "prints_of"]


class Output:
    """What a computation returned.

    Args:
        value: The value; its graph is not kept.
        with_graph: Whether two of them agree only if their graphs have the same connections.
    """

    def __init__(self, value: Any, *, with_graph: bool) -> None:
        self._tensors: list[Tensor] = []
        self._form = self._take(value)
        self._calls = _calls_of(self._tensors) if with_graph else Counter()
        self._tensors = [tensor.detach() for tensor in self._tensors]

    def _take(self, value: Any) -> Any:
        """Return the value with tensors replaced by what they are, and note these."""
        if isinstance(value, Tensor):
            self._tensors.append(value)
            return "tensor", tuple(value.shape), value.dtype, value.requires_grad
        if isinstance(value, Mapping):
            return [(repr(key), self._take(item)) for key, item in value.items()]
        if isinstance(value, list | tuple):
            return [self._take(item) for item in value]
        if is_dataclass(value) and not isinstance(value, type):
            return [(field.name, self._take(getattr(value, field.name))) for field in fields(value)]
        return repr(value) if isinstance(value, _COMPARED) else type(value).__name__

    def agrees(self, other: "Output") -> bool:
        """Return whether another output is the same, within rounding."""
        if self._form != other._form or self._calls != other._calls:
            return False
        return all(map(_close, self._tensors, other._tensors))


_COMPARED = (int, float, complex, str, type(None))
_NOT_COUNTED = {"torch::autograd::AccumulateGrad", "ToCopyBackward0"}  # parameters may be looked up twice, casts kept


def _calls_of(tensors: Sequence[Tensor]) -> Counter[tuple[str, str]]:
    """Count the connections in the graph of tensors by the names of the functions at both ends."""
    counts: Counter[tuple[str, str]] = Counter()
    seen = set()
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        following = [each for each, _ in function.next_functions if each is not None]
        waiting += following
        counts.update((function.name(), each.name()) for each in following)
    return Counter({names: count for names, count in counts.items() if not _NOT_COUNTED & {*names}})


def _close(one: Tensor, other: Tensor) -> bool:
    one, other = _plain(one), _plain(other).to(one.device)
    if torch.equal(one, other):
        return True
    if not one.is_floating_point():
        return False
    finite = one[one.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    tolerance = torch.finfo(one.dtype).eps ** 0.5
    return torch.allclose(other.double(), one.double(), rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor as one that is dense and real."""
    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def prints_of(value: Any) -> list[Any]:
    """Return what tells the values of tensors from others, for each of them that has any."""
    found = []
    with torch.no_grad():
        for tensor in tensors_in(value):
            if tensor.device.type != "meta":
                values = _plain(tensor).double()
                found.append((tuple(tensor.shape), repr(values.sum().item()), repr(values.abs().sum().item())))
    return found
