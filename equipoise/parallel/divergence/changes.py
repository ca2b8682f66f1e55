"""Marks of tensors, which differ after a change: a step that runs several times in place of once may not make any."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.interop.torch.modules import versions
from equipoise.parallel.divergence.digests import has_digest

__all__ = ["changed", "marks_of"]


def marks_of(tensors: Mapping[str, Tensor], *, contents: bool = False) -> dict[str, Any]:
    """Return by name what differs after a tensor was changed.

    Args:
        tensors: The tensors.
        contents: Whether changes by `data` are seen as well, which torch does not count. All values are read for this.
    """
    # Tensors of inference mode have no count of their writes.
    counts = versions(tensors.values()) or [0] * len(tensors)
    if contents:
        # All sums are begun before one is read, which waits for the device.
        sums = [_sum_of_bits(tensor) if has_digest(tensor) else None for tensor in tensors.values()]
        details: list[int | None] = [None if bits is None else int(bits) for bits in sums]
    else:
        details = list(map(_memory, tensors.values()))
    return dict(zip(tensors, zip(counts, details, strict=True), strict=True))


# What the bits of an element are read as, by its size in bytes.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum of all elements, read as integers, modulo 2**64. It is the same on each device."""
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64)


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return the name of a tensor whose marks differ, or which one of them lacks; None if there is none."""
    names = sorted({*before, *now})
    return next((name for name in names if before.get(name) != now.get(name)), None)


def _memory(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, or else its identity."""
    # Sparse tensors have none of their own, and of subclasses, such as lazy or quantised ones, not all have it.
    if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided:
        return tensor.data_ptr()
    return id(tensor)
