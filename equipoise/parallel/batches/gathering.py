"""Put the outputs of parts of a batch together as the output of the whole batch.

Structures of any depth are put together entry by entry:

    tensors, arrays of numpy      along the dimension of the samples, in the order of the data
    tensors without dimensions    and numbers: floating ones are averaged by weight, integers added
    lists with an item a sample   joined
    anything else                 the value itself where all parts agree, else a list of the values
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import StepError
from equipoise.parallel.batches.splitting import entries_of, rebuild
from equipoise.parallel.batches.weighting import Weight, weighted_mean
from equipoise.to_device import to_device

__all__ = ["PartialOutputs", "gather"]


def gather(
    outputs: Sequence[Any],
    sizes: Sequence[int],
    device: torch.device,
    *,
    dim: int = 0,
    weights: Sequence[Weight] | None = None,
) -> Any:
    """Puts outputs together.

    Args:
        outputs: What the steps returned, in the order of the data.
        sizes: The numbers of samples of the parts.
        device: Where tensors are gathered.
        dim: The dimension of the samples. Default: the first.
        weights: The weights of the parts in a mean. None: tensors without dimensions are stacked instead, as
            `nn.DataParallel` does.

    Raises:
        StepError: If the outputs differ in structure.
    """
    return _Gather(sizes, device, dim, weights)(outputs, "")


class _Gather:
    """See `gather`; called with outputs and the way to them."""

    def __init__(self, sizes: Sequence[int], device: torch.device, dim: int, weights: Sequence[Weight] | None) -> None:
        self.sizes, self.device, self.dim, self.weights = sizes, device, dim, weights

    def __call__(self, outputs: Sequence[Any], path: str) -> Any:
        first = outputs[0]
        if isinstance(first, Tensor):
            self._check(outputs, path, all(isinstance(out, Tensor) and self._fits(out, first) for out in outputs))
            return self._tensors([to_device(out, self.device) for out in outputs])
        if isinstance(first, Mapping):
            self._check(outputs, path, all(isinstance(out, Mapping) and out.keys() == first.keys() for out in outputs))
            return rebuild(first, [self([out[key] for out in outputs], f"{path}[{key!r}]") for key in first])
        if isinstance(first, list) and self._are_samples(outputs, path):
            return type(first)([item for out in outputs for item in out])
        if isinstance(first, (tuple, list)):
            self._check(outputs, path, all(type(out) is type(first) and len(out) == len(first) for out in outputs))
            items = zip(*outputs, strict=True)
            return rebuild(first, [self(each, f"{path}[{index}]") for index, each in enumerate(items)])
        if is_dataclass(first) and not isinstance(first, type):
            self._check(outputs, path, all(type(out) is type(first) for out in outputs))
            names = [field.name for field in fields(first)]
            return rebuild(first, [self([getattr(out, name) for out in outputs], f"{path}.{name}") for name in names])
        if _is_array(first):
            self._check(outputs, path, all(_is_array(out) and out.ndim == first.ndim for out in outputs))
            return self._arrays(outputs)
        self._check(outputs, path, not any(isinstance(out, (Tensor, Mapping, tuple, list)) for out in outputs))
        return self._others(outputs)

    def _fits(self, tensor: Tensor, first: Tensor) -> bool:
        """Whether tensors can be put together: they may differ in the dimension of the samples."""
        if tensor.ndim != first.ndim or tensor.layout != torch.strided:
            return tensor.ndim == first.ndim
        along = self.dim if first.ndim > self.dim else 0
        return tensor.shape[:along] + tensor.shape[along + 1 :] == first.shape[:along] + first.shape[along + 1 :]

    def _arrays(self, arrays: Sequence[Any]) -> Any:
        if len(arrays) == 1:
            return arrays[0]
        numpy, dims = sys.modules["numpy"], arrays[0].ndim
        return numpy.concatenate(arrays, self.dim if dims > self.dim else 0) if dims else numpy.stack(arrays)

    def _tensors(self, tensors: list[Tensor]) -> Tensor:
        if len(tensors) == 1:
            return tensors[0]
        if tensors[0].ndim:
            return torch.cat(tensors, self.dim if tensors[0].ndim > self.dim else 0)
        if self.weights is None or tensors[0].dtype is torch.bool:
            return torch.stack(tensors)
        if not tensors[0].is_floating_point():
            return torch.stack(tensors).sum(dtype=tensors[0].dtype)
        mean, _ = weighted_mean(tensors, self.weights, self.device)
        return tensors[0] if mean is None else mean

    def _others(self, values: Sequence[Any]) -> Any:
        if all(type(value) is int for value in values) and self.weights is not None:
            return sum(values)
        if all(type(value) is float for value in values) and self.weights is not None:
            return self._tensors([torch.tensor(value, dtype=torch.float64) for value in values]).item()
        return values[0] if all(_same(value, values[0]) for value in values) else list(values)

    def _are_samples(self, lists: Sequence[Any], path: str) -> bool:
        """Whether lists hold an item for each sample, rather than tensors of all samples."""
        if not all(isinstance(each, list) and len(each) == size for each, size in zip(lists, self.sizes, strict=True)):
            return False
        tensors = [tensor for each in lists for _, tensor in entries_of(each)]
        if not any(tensor.ndim for tensor in tensors) or len(set(self.sizes)) > 1:
            return True
        if len(lists) > 1 and len(lists[0]) > 1 and all(map(_is_row, lists, self.sizes)):
            raise StepError(
                f"A step returned a list{' at ' * bool(path)}{path} of {len(lists[0])} tensors of length"
                f" {len(lists[0])} for {len(lists[0])} samples: whether there is one for each sample cannot be told."
                " Return a tensor, a tuple or a dictionary."
            )
        return any(
            tensor.ndim and (tensor.ndim <= self.dim or tensor.size(self.dim) != size)
            for each, size in zip(lists, self.sizes, strict=True)
            for _, tensor in entries_of(each)
        )

    @staticmethod
    def _check(outputs: Sequence[Any], path: str, same: bool) -> None:
        if not same:
            raise _different(outputs, path)


def _different(outputs: Sequence[Any], path: str = "") -> StepError:
    told = "; ".join(f"part {number}: {_described(out)}" for number, out in enumerate(outputs, start=1))
    return StepError(
        f"The parts of a batch returned different structures{' at ' * bool(path)}{path}: {told}. A step must return the"
        " same structure for every part."
    )


def _kind(value: Any) -> Any:
    """What must be the same for all parts, at the top of a structure."""
    return frozenset(value) if isinstance(value, Mapping) else Tensor if isinstance(value, Tensor) else type(value)


def _is_row(items: list[Any], size: int) -> bool:
    """Whether all items are vectors whose length is the number of samples."""
    return all(isinstance(item, Tensor) and item.shape == (size,) for item in items)


def _is_array(value: Any) -> bool:
    """Whether something is an array of numpy, which is not imported to find out."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _same(value: Any, other: Any) -> bool:
    try:
        return value is other or (type(value) is type(other) and bool(value == other))
    except (RuntimeError, TypeError, ValueError):  # it compares its items, as a table does
        return False


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with keys {list(value)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of length {len(value)}"
    return type(value).__name__


@dataclass
class PartialOutputs:
    """What the parts of a batch returned; put together when somebody asks, since that costs memory of one device.

    Attributes:
        outputs, sizes, device, dim, weights: See `gather`.
    """

    outputs: Sequence[Any]
    sizes: Sequence[int]
    device: torch.device
    dim: int
    weights: Sequence[Weight]

    def check(self) -> None:
        """Checks that the parts returned the same kind of thing, where nobody may ask for it; None is passed over.

        Raises:
            StepError: If they did not.
        """
        if len({_kind(out) for out in self.outputs if out is not None}) > 1:
            raise _different(self.outputs)

    def gathered(self) -> Any:
        """The outputs, put together; without parts that returned nothing and weigh nothing."""
        parts = [
            part
            for part in zip(self.outputs, self.sizes, self.weights, strict=True)
            if part[0] is not None or isinstance(part[2], Tensor) or part[2]
        ]
        if not parts:
            return None
        outputs, sizes, weights = zip(*parts, strict=True)
        return gather(outputs, sizes, self.device, dim=self.dim, weights=weights)
