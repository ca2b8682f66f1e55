"""Tensors of all processes under DDP: reduced to one, or gathered."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor

__all__ = ["gather_tensors", "reduce_tensor"]

_OPERATIONS = {
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


def reduce_tensor(tensor: Tensor, device: torch.device, group: Any, reduce_op: Any) -> Tensor:
    """Return the reduction of a tensor over all processes.

    Args:
        tensor: The tensor, which is not changed.
        device: Where this process computes.
        group: The process group. None: all processes.
        reduce_op: "mean", "avg", "sum", "min" or "max", or torch's operation of that name. None: "mean".
    """
    operation = getattr(reduce_op, "name", reduce_op) or "mean"
    name = str(operation).lower()
    reduced = tensor.detach().to(device, copy=True)
    dist.all_reduce(reduced, _OPERATIONS[name], group=group)
    # Not each backend computes means, so the sum is divided here.
    if name in ("mean", "avg"):
        return reduced / dist.get_world_size(group)
    return reduced


def gather_tensors(value: Any, device: torch.device, group: Any, sync_grads: bool) -> Any:
    """Return the tensors of all processes, stacked along a new first dimension.

    Args:
        value: A tensor or a collection of tensors and numbers, of the same shapes in all processes.
        device: Where this process computes.
        group: The process group. None: all processes.
        sync_grads: Whether gradients flow back to the process that computed a tensor.
    """

    def gather(tensor: Tensor) -> Tensor:
        tensor = tensor.to(device).contiguous()
        if sync_grads and tensor.requires_grad:
            from torch.distributed.nn.functional import all_gather

            return torch.stack(all_gather(tensor, group))  # type: ignore[no-untyped-call]
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, tensor.detach(), group=group)
        return torch.stack(gathered)

    tensors = apply_to_collection(value, (int, float), lambda number: torch.tensor(number))
    return apply_to_collection(tensors, Tensor, gather)
