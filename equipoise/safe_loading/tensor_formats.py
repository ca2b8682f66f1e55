"""Build tensors of a checkpoint without torch's own functions.

Torch's functions trust the numbers that they get: a tensor larger than its storage makes the storage grow, by memory
without content. The functions here check them first. Their arguments are those that torch writes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.errors import CheckpointError
from equipoise.interop.torch.dispatch import empty_wrapper
from equipoise.safe_loading.stand_in import StandIn

__all__ = ["REBUILD", "STORAGE_TYPES", "Storage"]


@dataclass(frozen=True)
class Storage:
    """The bytes of one or several tensors.

    Attributes:
        untyped: The bytes.
        dtype: The type of element under which they were written.
    """

    untyped: torch.UntypedStorage
    dtype: torch.dtype


# The class that a storage had is its dtype; newer dtypes lie in an untyped storage.
STORAGE_TYPES: dict[str, torch.dtype] = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
    "UntypedStorage": torch.uint8,
}


def _rebuild_tensor(storage: Storage, offset: int, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Build a tensor on a storage."""
    return _view(storage, storage.dtype, offset, size, stride)


def _rebuild_tensor_v2(
    storage: Storage,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    requires_grad: bool,
    hooks: Any,
    metadata: dict[str, bool] | None = None,
) -> Tensor:
    """Build a tensor on a storage; hooks, which torch does not write either, are left out."""
    return _apply_flags(_view(storage, storage.dtype, offset, size, stride), requires_grad, metadata)


def _rebuild_tensor_v3(
    storage: Storage,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    requires_grad: bool,
    hooks: Any,
    dtype: torch.dtype,
    metadata: dict[str, bool] | None = None,
) -> Tensor:
    """Build a tensor of a newer dtype, whose storage has none."""
    return _apply_flags(_view(storage, dtype, offset, size, stride), requires_grad, metadata)


def _view(storage: Storage, dtype: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return a tensor on a storage, after a check that the storage is large enough."""
    # 1. Check the numbers by themselves.
    sizes = _checked_counts(size)
    strides = _checked_counts(stride)
    (start,) = _checked_counts((offset,))
    if len(sizes) != len(strides):
        raise CheckpointError(f"a tensor has {len(sizes)} sizes and {len(strides)} strides")

    # 2. Compare the end of the tensor, in elements, with that of the storage. A tensor without elements needs none.
    end = start
    if all(sizes):
        end += 1
        for count, step in zip(sizes, strides, strict=True):
            end += (count - 1) * step
    if end * dtype.itemsize > storage.untyped.nbytes():
        raise CheckpointError(f"a tensor of shape {sizes} is larger than its storage")

    # 3. Build the tensor.
    empty = torch.empty(0, dtype=dtype, device=storage.untyped.device)
    return empty.set_(storage.untyped, start, sizes, strides)


def _checked_counts(values: Sequence[int]) -> tuple[int, ...]:
    """Return sizes, strides or offsets after a check that each is a non-negative integer."""
    if not _are_counts(values):
        raise CheckpointError(f"sizes, strides and offsets of tensors must be non-negative integers, not {values!r}")
    return tuple(values)


def _are_counts(values: Any) -> bool:
    if not isinstance(values, tuple | list):
        return False
    return all(type(value) is int and value >= 0 for value in values)


def _apply_flags(tensor: Tensor, requires_grad: bool, metadata: dict[str, bool] | None) -> Tensor:
    """Apply the lazy conjugation and negation under which a tensor was written, and `requires_grad`."""
    if metadata is None:
        metadata = {}
    if metadata.get("conj"):
        tensor = tensor.conj()
    if metadata.get("neg"):
        # The result takes memory for each element, though elements may repeat in the storage.
        size = tensor.numel() * tensor.itemsize
        if size > tensor.untyped_storage().nbytes():
            raise CheckpointError(f"a negated tensor of shape {tuple(tensor.shape)} is larger than its storage")
        tensor = torch.neg(tensor)
    return tensor.requires_grad_(bool(requires_grad))


def _rebuild_parameter(data: Tensor, requires_grad: bool, hooks: Any) -> nn.Parameter:
    """Build a parameter."""
    return nn.Parameter(_checked_tensor(data), bool(requires_grad))


def _rebuild_parameter_with_state(data: Tensor, requires_grad: bool, hooks: Any, state: Any) -> nn.Parameter:
    """Build a parameter that had attributes."""
    parameter = _rebuild_parameter(data, requires_grad, hooks)
    _set_attributes(parameter, state)
    return parameter


def _rebuild_from_type_v2(function: Any, kind: Any, arguments: Sequence[Any], state: Any) -> Any:
    """Build a tensor of a derived class, or one with attributes; a class that is not allowed becomes a plain tensor."""
    if isinstance(function, StandIn):
        return function
    if not any(function is allowed for allowed in REBUILD.values()):
        raise CheckpointError(f"a tensor cannot be built by {function!r}")
    tensor = function(*arguments)
    if not isinstance(tensor, StandIn):
        _set_attributes(tensor, state)
    return tensor


def _rebuild_wrapper_subclass(
    kind: Any,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
    layout: torch.layout,
    device: torch.device,
    requires_grad: bool,
) -> Any:
    """Build a tensor that wraps others, if the user has allowed its class; the others are attributes, set later."""
    if isinstance(kind, StandIn):
        return kind
    wraps = isinstance(kind, type) and issubclass(kind, Tensor)
    if not wraps or kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
        raise CheckpointError(f"a tensor that wraps others cannot be of {kind!r}")
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"a tensor that wraps others has the dtype {dtype!r}")
    return empty_wrapper(kind, dtype, _checked_counts(size), _checked_counts(stride))


def _set_attributes(tensor: Tensor, state: Any) -> None:
    """Set the attributes that a user gave a tensor, and none that torch gives a meaning."""
    attributes = state
    # A pair where the class has `__slots__`; those are left out.
    if isinstance(state, tuple) and state:
        attributes = state[0]
    if not isinstance(attributes, dict):
        return
    for key, value in attributes.items():
        if not hasattr(Tensor, str(key)):
            vars(tensor)[key] = value


def _rebuild_sparse_tensor(layout: torch.layout, data: Sequence[Any]) -> Tensor:
    """Build a sparse tensor; torch checks its indices, unless the values of tensors are not read."""
    if layout is torch.sparse_coo:
        indices, values, size = data[:3]
        return torch.sparse_coo_tensor(
            _checked_tensor(indices),
            _checked_tensor(values),
            _checked_counts(size),
            device=values.device,
            check_invariants=not values.is_meta,
        )
    compressed, plain, values, size = data
    return torch.sparse_compressed_tensor(
        _checked_tensor(compressed),
        _checked_tensor(plain),
        _checked_tensor(values),
        _checked_counts(size),
        layout=layout,
        device=values.device,
        check_invariants=not values.is_meta,
    )


def _rebuild_meta_tensor_no_storage(
    dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], requires_grad: bool
) -> Tensor:
    """Build a tensor without values."""
    sizes = _checked_counts(size)
    tensor = torch.empty_strided(sizes, _checked_counts(stride), dtype=dtype, device="meta")
    return tensor.requires_grad_(bool(requires_grad))


def _checked_tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise CheckpointError(f"a tensor is expected, not {type(value).__name__}")
    return value


# Torch's names, which stand in every checkpoint.
REBUILD: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter_with_state,
    "torch._utils._rebuild_sparse_tensor": _rebuild_sparse_tensor,
    "torch._utils._rebuild_wrapper_subclass": _rebuild_wrapper_subclass,
    "torch._utils._rebuild_meta_tensor_no_storage": _rebuild_meta_tensor_no_storage,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type_v2,
}
