"""The norm of gradients of which some are cut over the rows of the mesh alone, and some over its columns as well."""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from equipoise.extensions.fsdp.mesh.grid import part_of
from equipoise.interop.torch import foreach

__all__ = ["clip_by_norm"]

# As in `torch.nn.utils.clip_grads_with_norm_`.
_EPSILON = 1e-6


@torch.no_grad()
def clip_by_norm(parameters: Iterable[Tensor], largest: float) -> None:
    """Clip gradients by the norm of all of them; all processes call this together.

    Torch's `clip_grad_norm_` takes gradients of one mesh only. Here each process adds up the squares of its parts, of
    which some are the same in several processes, and the processes exchange one number.

    Args:
        parameters: The parameters; those without a gradient are left out.
        largest: The largest norm.
    """
    # 1. The parts of this process, by the number of processes that hold the same.
    parts_by_copies = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            parts_by_copies[_copies_of(parameter.grad)].append(part_of(parameter.grad))

    # 2. The sum of the squares over all processes.
    parts = [part for same in parts_by_copies.values() for part in same]
    if not parts:
        return
    total = torch.zeros((), dtype=torch.float64, device=parts[0].device)
    for copies, same in parts_by_copies.items():
        total += nn.utils.get_total_norm(same).to(total).square() / copies
    dist.all_reduce(total)

    # 3. Clip.
    foreach.multiply_(parts, (largest / (total.sqrt() + _EPSILON)).clamp(max=1.0))


def _copies_of(gradient: Tensor) -> int:
    """Return the number of processes that hold the same part of a gradient."""
    copies = dist.get_world_size()
    if not isinstance(gradient, DTensor):
        return copies
    for dimension, placement in enumerate(gradient.placements):
        if not placement.is_replicate():
            copies //= gradient.device_mesh.size(dimension)
    return copies
