"""Processes that exchange values over torch's default process group."""

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor

from equipoise.parallel.communication.agreements import agree_to_end
from equipoise.parallel.communication.object_exchange import broadcast_object, gather_objects
from equipoise.parallel.communication.processes import Processes

__all__ = ["ConnectedProcesses"]

T = TypeVar("T")

_OPERATIONS = {
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


class ConnectedProcesses(Processes):
    """Exchanges values with the other processes of the default group. Derived classes start them, or join them.

    Attributes:
        device: The device of this process.
    """

    device: torch.device

    def __init__(self) -> None:
        self._failed = False

    def ends_after(self, batch: int, window: int) -> bool:
        """Return True if all processes end after this batch; see `Processes.ends_after`."""
        if not self.is_connected:
            return True
        return agree_to_end(self.rank, self.world_size, self.device, batch, window)

    def mark_failed(self) -> None:
        """Stop all communication: the other processes have not failed and would not join."""
        self._failed = True

    def forget_failure(self) -> None:
        """Communicate again, in the next run."""
        self._failed = False

    @property
    def is_connected(self) -> bool:
        """True if other processes take part in exchanges: a run is under way, and this process has not failed."""
        if self.world_size == 1 or self._failed:
            return False
        return dist.is_initialized()

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: str = "mean") -> Any:
        """Reduce a value over all processes; see `Processes.reduce`."""
        if not self.is_connected or not isinstance(tensor, Tensor):
            return tensor
        return _reduce_tensor(tensor, self.device, group, reduce_op)

    def all_gather(self, tensor: Any, group: Any | None = None, sync_grads: bool = False) -> Any:
        """Return the values of all processes, along a new first dimension; see `Processes.all_gather`."""
        if not self.is_connected:
            return tensor
        tensors = apply_to_collection(tensor, (int, float), torch.tensor)
        return apply_to_collection(tensors, Tensor, _gather_tensor, self.device, group, sync_grads)

    def gather_objects(self, value: T) -> list[T]:
        """Return the values of all processes, in the order of their ranks."""
        if not self.is_connected:
            return [value]
        return gather_objects(value)

    def broadcast(self, value: T, src: int = 0) -> T:
        """Return the value of one process, in all; see `Processes.broadcast`."""
        if not self.is_connected:
            return value
        return broadcast_object(value, src)

    def barrier(self, name: str | None = None) -> None:
        """Wait until every process has reached this call."""
        if not self.is_connected:
            return
        # NCCL would guess the device from the rank.
        device_ids = None
        if self.device.type == "cuda":
            device_ids = [self.device.index or 0]
        dist.barrier(device_ids=device_ids)


def _reduce_tensor(tensor: Tensor, device: torch.device, group: Any, reduce_op: Any) -> Tensor:
    """Return the reduction of a tensor over all processes, by a name or an operation of torch; None: the mean."""
    name = getattr(reduce_op, "name", reduce_op)
    name = str(name or "mean").lower()
    reduced = tensor.detach().to(device, copy=True)
    dist.all_reduce(reduced, _OPERATIONS[name], group=group)
    # Not each backend computes means, so the sum is divided here.
    if name in ("mean", "avg"):
        return reduced / dist.get_world_size(group)
    return reduced


def _gather_tensor(tensor: Tensor, device: torch.device, group: Any, sync_grads: bool) -> Tensor:
    """Return a tensor of all processes, stacked along a new first dimension."""
    local = tensor.to(device).contiguous()
    if sync_grads and local.requires_grad:
        return _gather_with_graph(local, group)
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, local.detach(), group=group)
    return torch.stack(gathered)


def _gather_with_graph(tensor: Tensor, group: Any) -> Tensor:
    """Return the stacked tensors of all processes; their backward reaches the process of each tensor."""
    from torch.distributed.nn.functional import all_gather

    gathered = all_gather(tensor, group)  # type: ignore[no-untyped-call]
    return torch.stack(gathered)
