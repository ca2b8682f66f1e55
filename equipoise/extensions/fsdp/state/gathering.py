"""Whole tensors, gathered from the shards of all processes."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from equipoise.parallel.batches.shares import even_chunks

__all__ = ["gather_whole", "whole"]


def whole(value: Any, *, keep: bool = True) -> Any:
    """Return a tensor in shards as a whole on the CPU; called in all processes.

    Args:
        value: The tensor. Everything else is returned as it is.
        keep: Whether this process needs the values. False: a tensor without memory. Default: True.
    """
    if not isinstance(value, DTensor):
        return value
    gathered = gather_whole(value)
    if keep:
        return gathered.cpu()
    return torch.empty(gathered.shape, dtype=gathered.dtype, device="meta")


@torch.no_grad()
def gather_whole(tensor: DTensor) -> Tensor:
    """Return a tensor in shards as a whole on its device; called in all processes.

    `DTensor.full_tensor()` waits for the messages of functional collectives. A process died in that wait once, by
    "double free or corruption" on torch 2.15. Plain collectives do without it.

    Args:
        tensor: The tensor.
    """
    part: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    placements: tuple[Placement, ...] = tensor.placements
    is_plain = type(part) in (Tensor, torch.nn.Parameter)
    has_sums = any(placement.is_partial() for placement in placements)
    if has_sums or not is_plain:
        result: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
        return result

    # 1. How long the cut dimension was before each cut.
    mesh = tensor.device_mesh
    cuts = _cuts(placements, mesh)
    lengths = []
    shape = list(tensor.shape)
    for mesh_dimension, dimension in cuts:
        length = shape[dimension]
        lengths.append(length)
        count = mesh.size(mesh_dimension)
        rank = mesh.get_local_rank(mesh_dimension)
        # Parts are those of `torch.chunk`, of which the last ones may be empty.
        shape[dimension] = even_chunks(length, count)[rank]

    # 2. The last cut is undone first.
    for (mesh_dimension, dimension), length in zip(reversed(cuts), reversed(lengths), strict=True):
        part = _joined(part, dimension, length, mesh.get_group(mesh_dimension))
    return part


def _cuts(placements: tuple[Placement, ...], mesh: DeviceMesh) -> list[tuple[int, int]]:
    """Return the dimension of the mesh and that of the tensor for each cut, in the order in which they were made.

    Torch cuts by the dimensions of the mesh in their order. `fully_shard` cuts parts of parts, and its placement has
    the number of those parts as `split_factor`.
    """
    first = []
    last = []
    for mesh_dimension, placement in enumerate(placements):
        # A mesh of one process may have no group any more.
        if placement.is_replicate() or mesh.size(mesh_dimension) == 1:
            continue
        cut = (mesh_dimension, placement.dim)  # type: ignore[attr-defined]
        if getattr(placement, "split_factor", 1) > 1:
            last.append(cut)
        else:
            first.append(cut)
    return first + last


def _joined(part: Tensor, dimension: int, length: int, group: dist.ProcessGroup) -> Tensor:
    """Return the parts of all processes of a group as one tensor."""
    sizes = even_chunks(length, dist.get_world_size(group))
    # Messages of all processes have one size. Bytes are of a type that each backend knows.
    shape = list(part.shape)
    shape[dimension] = sizes[0]
    sent = part.new_zeros(shape)
    sent.narrow(dimension, 0, part.shape[dimension]).copy_(part)
    received = [torch.empty_like(sent) for _ in sizes]
    if sent.numel():
        messages = [message.view(torch.uint8) for message in received]
        dist.all_gather(messages, sent.view(torch.uint8), group=group)
    parts = []
    for size, message in zip(sizes, received, strict=True):
        parts.append(message.narrow(dimension, 0, size))
    return torch.cat(parts, dimension)
