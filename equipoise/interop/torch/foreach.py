"""Torch's fused list operations: one call for a whole list of tensors.

Their names begin with an underscore, although torch's documentation lists them and its optimisers rely on them.
"""

import torch
from torch import Tensor

from equipoise.to_device import to_device

__all__ = ["add_", "copy_", "multiply_"]

# Torch takes no other sequences.
Tensors = list[Tensor] | tuple[Tensor, ...]
# Torch converts a 0-dim factor to these dtypes itself; in half precision it multiplies by a float32 factor.
_EXACT = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def add_(tensors: list[Tensor], addends: list[Tensor]) -> None:
    """Add to every tensor in place the addend at its position. Sparse tensors are added one by one."""
    are_strided = all(tensor.layout == torch.strided for tensor in (*tensors, *addends))
    if not are_strided:
        for tensor, addend in zip(tensors, addends, strict=True):
            tensor.add_(addend)
    elif tensors:
        torch._foreach_add_(tensors, addends)


def copy_(tensors: Tensors, sources: Tensors) -> None:
    """Copy into every tensor the source at its position, from any device."""
    if tensors:
        torch._foreach_copy_(tensors, sources)


def multiply_(tensors: Tensors, factor: float | Tensor) -> None:
    """Multiply every tensor in place by `factor`, a number or a 0-dim tensor.

    Args:
        tensors: Tensors of any shape, dtype and device.
        factor: The common factor. A tensor is copied to the devices of `tensors`.
    """
    if not tensors:
        return
    if not isinstance(factor, Tensor):
        torch._foreach_mul_(tensors, factor)
        return
    # A 0-dim tensor must be on the device of the list, so each device needs one call.
    groups: dict[tuple[torch.device, torch.dtype | None], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, _dtype_of_product(tensor)), []).append(tensor)
    for (device, dtype), group in groups.items():
        local_factor = to_device(factor, device)
        if dtype is not None:
            local_factor = local_factor.to(dtype)
        torch._foreach_mul_(group, local_factor)


def _dtype_of_product(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype in which torch multiplies a tensor by a 0-dim one; None if that depends on both.

    Torch multiplies a list in one kernel only if the factor has that dtype already.
    """
    if tensor.ndim and tensor.dtype in _EXACT:
        return tensor.dtype
    return None
