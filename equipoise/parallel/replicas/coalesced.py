"""Coalesced exchanges between replicas: parameters to all of them, gradients to the first.

Between distinct CUDA devices many small tensors travel in few large messages. Elsewhere every tensor is copied by
itself.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.cuda import comm

from equipoise.interop.torch import foreach
from equipoise.to_device import to_device

__all__ = ["add_rows", "broadcast"]


def broadcast(
    tensors: Sequence[Tensor],
    devices: Sequence[torch.device],
) -> list[Sequence[Tensor]]:
    """Return, for each device, tensors with these values, to copy from.

    Args:
        tensors: Tensors, all on one device.
        devices: The devices of the receivers.
    """
    uncopied = [tensors for _ in devices]
    if not tensors:
        return uncopied
    sender = tensors[0].device
    all_devices = [sender, *devices]
    if not _are_distinct(all_devices):
        return uncopied
    # Autograd would record the copies.
    detached = [_real(tensor.detach()) for tensor in tensors]
    copies: list[list[Tensor]] = comm.broadcast_coalesced(detached, all_devices)  # type: ignore[no-untyped-call]
    # The first list is the sender's own.
    return [_as_sent(received, tensors) for received in copies[1:]]


def add_rows(rows: Sequence[Sequence[Tensor | None]], device: torch.device, *, in_place: bool) -> list[Tensor | None]:
    """Return the sum of the gradients of each parameter, on a device; None if it has none.

    Args:
        rows: For each parameter, its gradients on all devices, in the same order; None where there is none.
        device: The device of the sums.
        in_place: Whether sums may be written into the first gradient of a row. False: gradients do not change.
    """
    # 1. Group the parameters by the devices that have a gradient of them: the lists of a group have equal lengths.
    groups: dict[tuple[bool, ...], list[int]] = {}
    for index, row in enumerate(rows):
        presence = tuple(gradient is not None for gradient in row)
        groups.setdefault(presence, []).append(index)

    # 2. Sum each group, device by device.
    sums: list[Tensor | None] = [None] * len(rows)
    for presence, indices in groups.items():
        columns: list[list[Any]] = []
        for position, is_present in enumerate(presence):
            if is_present:
                columns.append([rows[index][position] for index in indices])
        if not columns:
            continue
        needs_copy = not in_place and len(columns) > 1
        columns[0] = [gradient.to(device, copy=needs_copy) for gradient in columns[0]]
        totals = _reduce_add(columns)
        for index, total in zip(indices, totals, strict=True):
            sums[index] = total
    return sums


def _reduce_add(columns: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
    """Return the sums of columns of equal length, each of tensors on one device, on the device of the first column.

    Without coalescing the sums are written into the first column.
    """
    first, *rest = columns
    if not first or not rest:
        return first
    root = first[0].device
    devices = [column[0].device for column in columns]
    # Sparse tensors cannot travel in one message.
    is_sparse = any(tensor.is_sparse for tensor in first)
    if _are_distinct(devices) and not is_sparse:
        real_columns = [[_real(tensor) for tensor in column] for column in columns]
        sums: list[Tensor] = comm.reduce_add_coalesced(real_columns, root.index)  # type: ignore[no-untyped-call]
        return _as_sent(sums, first)
    for column in rest:
        foreach.add_(list(first), [to_device(tensor, root) for tensor in column])
    return first


def _real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of real numbers, and any other as it is; messages have real numbers only."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor


def _as_sent(received: Sequence[Tensor], sent: Sequence[Tensor]) -> list[Tensor]:
    """Return received tensors in the dtypes of those that were sent, some of which may be complex."""
    tensors = []
    for values, original in zip(received, sent, strict=True):
        if original.is_complex():
            # Within a message, the pairs may begin where no complex number can.
            values = torch.view_as_complex(values.clone())
        tensors.append(values)
    return tensors


def _are_distinct(devices: Sequence[torch.device]) -> bool:
    """Return True if these are CUDA devices that all differ."""
    types = {device.type for device in devices}
    if types != {"cuda"}:
        return False
    return len(set(devices)) == len(devices)
