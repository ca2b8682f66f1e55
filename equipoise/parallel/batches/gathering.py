"""Put the outputs of parts of a batch together as the output of the whole batch.

Structures of any depth are put together entry by entry:

    tensors, arrays of numpy      along the dimension of the samples, in the order of the data
    tensors without dimensions    and numbers: floating ones are averaged by weight, integers added
    lists with an item a sample   joined
    anything else                 the value itself where all parts agree, else a list of the values
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import StepError
from equipoise.parallel.batches.weighting import Weight, weighted_mean
from equipoise.to_device import to_device
from equipoise.tree import entries_of, rebuild

__all__ = ["check_kinds", "gather"]


def gather(
    outputs: Sequence[Any],
    sizes: Sequence[int],
    device: torch.device,
    *,
    dim: int = 0,
    weights: Sequence[Weight] | None = None,
) -> Any:
    """Put outputs together.

    Args:
        outputs: The return value of each step, in the order of the data.
        sizes: The number of samples of each part.
        device: The device of all tensors in the result.
        dim: The dimension of the samples. Default: the first.
        weights: The weight of each part in a mean. None: tensors without dimensions are stacked instead, as
            `nn.DataParallel` does.

    Raises:
        StepError: If the outputs differ in structure.
    """
    return _Gatherer(sizes, device, dim, weights).gather(outputs, "")


def check_kinds(outputs: Sequence[Any]) -> None:
    """Check that the parts of a batch returned the same kind of value; None is ignored.

    Raises:
        StepError: If they did not.
    """
    kinds = {_kind(output) for output in outputs if output is not None}
    if len(kinds) > 1:
        raise _different(outputs)


class _Gatherer:
    """Gathers nested outputs. See `gather` for the arguments."""

    def __init__(
        self,
        sizes: Sequence[int],
        device: torch.device,
        dim: int,
        weights: Sequence[Weight] | None,
    ) -> None:
        self.sizes = sizes
        self.device = device
        self.dim = dim
        self.weights = weights

    def gather(self, outputs: Sequence[Any], path: str) -> Any:
        """Put outputs at this path of the structure together. The first output shows their type."""
        first = outputs[0]
        if isinstance(first, Tensor):
            return self._tensors(outputs, path)
        if isinstance(first, Mapping):
            return self._mappings(outputs, path)
        if isinstance(first, list) and self._are_samples(outputs, path):
            return type(first)([item for output in outputs for item in output])
        if isinstance(first, (tuple, list)):
            return self._sequences(outputs, path)
        if is_dataclass(first) and not isinstance(first, type):
            return self._dataclasses(outputs, path)
        if _is_array(first):
            return self._arrays(outputs, path)
        return self._values(outputs, path)

    def _tensors(self, outputs: Sequence[Any], path: str) -> Tensor:
        first = outputs[0]
        for output in outputs:
            # Tensors of other shapes cannot be put together.
            if not isinstance(output, Tensor) or not self._fits(output, first):
                raise _different(outputs, path)
        return self._join([to_device(output, self.device) for output in outputs])

    def _fits(self, tensor: Tensor, first: Tensor) -> bool:
        """Return whether tensors can be put together: they may differ in the dimension of the samples."""
        if tensor.ndim != first.ndim:
            return False
        # The shapes of sparse and nested tensors are left to torch.
        if tensor.layout != torch.strided:
            return True
        return self._shape_of_sample(tensor) == self._shape_of_sample(first)

    def _shape_of_sample(self, tensor: Tensor) -> list[int]:
        shape = list(tensor.shape)
        # The slice, since a tensor without dimensions has nothing to remove.
        dim = self._sample_dim(tensor)
        del shape[dim : dim + 1]
        return shape

    def _sample_dim(self, tensor: Any) -> int:
        """Return the dimension of the samples, or the first for tensors and arrays of fewer dimensions."""
        if tensor.ndim > self.dim:
            return self.dim
        return 0

    def _join(self, tensors: list[Tensor]) -> Tensor:
        """Put tensors on the same device together."""
        first = tensors[0]
        if len(tensors) == 1:
            return first
        if first.ndim:
            return torch.cat(tensors, self._sample_dim(first))
        if self.weights is None or first.dtype is torch.bool:
            return torch.stack(tensors)
        if not first.is_floating_point():
            return torch.stack(tensors).sum(dtype=first.dtype)
        mean, _ = weighted_mean(tensors, self.weights, self.device)
        # Without any weight there is no mean.
        if mean is None:
            return first
        return mean

    def _mappings(self, outputs: Sequence[Any], path: str) -> Any:
        first = outputs[0]
        for output in outputs:
            if not isinstance(output, Mapping) or output.keys() != first.keys():
                raise _different(outputs, path)
        results = [self.gather([output[key] for output in outputs], f"{path}[{key!r}]") for key in first]
        return rebuild(first, results)

    def _sequences(self, outputs: Sequence[Any], path: str) -> Any:
        first = outputs[0]
        for output in outputs:
            if type(output) is not type(first) or len(output) != len(first):
                raise _different(outputs, path)
        columns = zip(*outputs, strict=True)
        return rebuild(first, [self.gather(values, f"{path}[{index}]") for index, values in enumerate(columns)])

    def _dataclasses(self, outputs: Sequence[Any], path: str) -> Any:
        first = outputs[0]
        for output in outputs:
            if type(output) is not type(first):
                raise _different(outputs, path)
        results = []
        for field in fields(first):
            values = [getattr(output, field.name) for output in outputs]
            results.append(self.gather(values, f"{path}.{field.name}"))
        return rebuild(first, results)

    def _arrays(self, outputs: Sequence[Any], path: str) -> Any:
        first = outputs[0]
        for output in outputs:
            if not _is_array(output) or output.ndim != first.ndim:
                raise _different(outputs, path)
        if len(outputs) == 1:
            return first
        numpy = sys.modules["numpy"]
        if first.ndim:
            return numpy.concatenate(outputs, self._sample_dim(first))
        return numpy.stack(outputs)

    def _values(self, outputs: Sequence[Any], path: str) -> Any:
        """Put numbers together by weight, and other values if they are equal."""
        for output in outputs:
            if isinstance(output, (Tensor, Mapping, tuple, list)):
                raise _different(outputs, path)
        if self.weights is not None:
            if all(type(value) is int for value in outputs):
                return sum(outputs)
            if all(type(value) is float for value in outputs):
                tensors = [torch.tensor(value, dtype=torch.float64) for value in outputs]
                mean = self._join(tensors)
                return mean.item()
        first = outputs[0]
        if all(_same(value, first) for value in outputs):
            return first
        return list(outputs)

    def _are_samples(self, outputs: Sequence[Any], path: str) -> bool:
        """Return whether lists hold an item for each sample, rather than tensors of all samples."""
        # 1. There are as many items as samples.
        tensors = []
        for output, size in zip(outputs, self.sizes, strict=True):
            if not isinstance(output, list) or len(output) != size:
                return False
            for _, tensor in entries_of(output):
                tensors.append((tensor, size))

        # 2. Numbers are of one sample. Lists of different lengths cannot hold tensors of all samples.
        if not any(tensor.ndim for tensor, _ in tensors):
            return True
        if len(set(self.sizes)) > 1:
            return True

        # 3. As many vectors as samples, as long as there are samples, may be either.
        first = outputs[0]
        has_several = len(outputs) > 1 and len(first) > 1
        if has_several and all(map(_is_row, outputs, self.sizes)):
            raise _ambiguous(first, path)

        # 4. Tensors of all samples are as long as there are samples.
        for tensor, size in tensors:
            if tensor.ndim == 0:
                continue
            if tensor.ndim <= self.dim or tensor.size(self.dim) != size:
                return True
        return False


def _ambiguous(items: list[Any], path: str) -> StepError:
    """Return the error for a list of vectors that may be one for each sample, or each of all samples."""
    place = f" at {path}" if path else ""
    return StepError(
        f"A step returned a list{place} of {len(items)} tensors of length"
        f" {len(items)} for {len(items)} samples: whether there is one for each sample cannot be told."
        " Return a tensor, a tuple or a dictionary."
    )


def _different(outputs: Sequence[Any], path: str = "") -> StepError:
    """Return the error for parts that returned different structures."""
    place = f" at {path}" if path else ""
    descriptions = [f"part {number}: {_described(output)}" for number, output in enumerate(outputs, start=1)]
    parts = "; ".join(descriptions)
    return StepError(
        f"The parts of a batch returned different structures{place}: {parts}. A step must return the"
        " same structure for every part."
    )


def _kind(value: Any) -> Any:
    """Return what all parts must share at the top of a structure: the keys, or the type."""
    if isinstance(value, Mapping):
        return frozenset(value)
    # Subclasses of tensors, such as parameters, count as tensors.
    if isinstance(value, Tensor):
        return Tensor
    return type(value)


def _is_row(items: list[Any], size: int) -> bool:
    """Return whether all items are vectors whose length is the number of samples."""
    return all(isinstance(item, Tensor) and item.shape == (size,) for item in items)


def _is_array(value: Any) -> bool:
    """Return whether a value is an array of numpy. Does not import numpy."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    return isinstance(value, numpy.ndarray)


def _same(value: Any, first: Any) -> bool:
    if value is first:
        return True
    if type(value) is not type(first):
        return False
    try:
        return bool(value == first)
    except (RuntimeError, TypeError, ValueError):
        # The value compares its items, as a table does.
        return False


def _described(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {kind} with keys {list(value)}"
    if isinstance(value, (tuple, list)):
        return f"a {kind} of length {len(value)}"
    return kind
