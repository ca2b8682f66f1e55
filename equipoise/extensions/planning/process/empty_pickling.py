"""Pickle a module and its batch without the contents of their tensors, for a process that needs their shapes only."""

import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.errors import ConfigurationError
from equipoise.parallel.payload.object_pickling import Pickler
from equipoise.parallel.payload.unpicklable_parts import explain

__all__ = ["packed"]


class _EmptyPickler(Pickler):
    """Pickles the shapes of tensors in their place."""

    def reducer_override(self, value: Any) -> Any:
        """Reduce tensors to their shapes, and everything else as usual."""
        if isinstance(value, Tensor) and value.layout is torch.strided:
            make = _empty
            if isinstance(value, nn.Parameter):
                make = _empty_parameter
            return make, (tuple(value.shape), value.stride(), value.dtype, value.requires_grad)
        return super().reducer_override(value)


def packed(value: Any, *, with_contents: bool) -> bytes:
    """Return a pickled object.

    Args:
        value: The object, with tensors in it.
        with_contents: True to send what is in the tensors, too.

    Raises:
        ConfigurationError: If a part of it cannot be pickled, naming it.
    """
    file = io.BytesIO()
    pickler = Pickler(file, None)
    if not with_contents:
        pickler = _EmptyPickler(file, None)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError, RecursionError) as error:
        raise ConfigurationError(explain(value, error)) from error
    return file.getvalue()


def _empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> Tensor:
    tensor = torch.empty_strided(shape, stride, dtype=dtype)
    return tensor.requires_grad_(requires_grad)


def _empty_parameter(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
) -> nn.Parameter:
    data = torch.empty_strided(shape, stride, dtype=dtype)
    return nn.Parameter(data, requires_grad=requires_grad)
