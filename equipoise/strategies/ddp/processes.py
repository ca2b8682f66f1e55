"""The processes of DDP: they meet in a process group of torch, and exchange values over it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor

from equipoise.parallel.communication.agreed_end import agree_to_end
from equipoise.parallel.communication.membership import check_alone, check_count, in_group, place_of_worker
from equipoise.parallel.communication.object_exchange import broadcast_object, gather_objects
from equipoise.parallel.communication.process_group import StoreServer, follows_from_another
from equipoise.parallel.communication.processes import Processes
from equipoise.parallel.communication.rank import Rank, find_rank
from equipoise.parallel.workers.launch import launch

__all__ = ["ProcessGroup", "gather_tensors", "reduce_tensor"]

T = TypeVar("T")

_OPERATIONS = {
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


class ProcessGroup(Processes):
    """A process for each device, started here or by a launcher such as torchrun.

    Args:
        devices: The devices of this machine, one for each process.
        num_nodes: Number of machines.
        timeout: Seconds for which processes wait for one another.
        backend: Torch's backend. None: "nccl" on CUDA, else "gloo".
        on_joined: Function that is called in a process that was started here, once its rank is known.

    Attributes:
        device: The device of this process.

    Raises:
        ConfigurationError: If the number of processes that a launcher has started is not that of the devices.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        num_nodes: int,
        *,
        timeout: float,
        backend: str | None,
        on_joined: Callable[[], None],
    ) -> None:
        self._devices = tuple(devices)
        self._timeout = timeout
        self._backend = backend
        self._on_joined = on_joined
        self._failed = False
        # The rank of this process, if a launcher has started it.
        self._launched_rank = find_rank()
        if self._launched_rank is None:
            check_alone(num_nodes)
            self.world_size = len(self._devices)
            self.spawns = self.world_size > 1
            self.device = self._devices[0]
        else:
            check_count(self._launched_rank, self._devices, num_nodes)
            self._take_rank(self._launched_rank)

    def _take_rank(self, rank: Rank) -> None:
        """Set the ranks of this process and its device."""
        self.rank = rank.global_rank
        self.local_rank = rank.local_rank
        self.node_rank = rank.node_rank
        self.world_size = rank.world_size
        index = rank.local_rank % len(self._devices)
        self.device = self._devices[index]

    def launch(self, function: Callable[[], T], known: Sequence[Any] = ()) -> T:
        """Run a function in every process; see `Processes.launch`."""
        # 1. A launcher has started all processes.
        if self._launched_rank is not None:
            with self._in_group(self._launched_rank):
                return function()
        # 2. One process needs no group.
        if self.world_size == 1:
            return function()
        # 3. The others start here, and meet at a store of this process.
        with StoreServer() as store:
            run = partial(_run_in_process, self, function, store.port)
            result: T = launch(run, self.world_size, known=known, is_consequence=follows_from_another)
        return result

    def run_as(self, index: int, function: Callable[[], T], port: int) -> T:
        """Run a function in a process that was started here.

        Args:
            index: Number of the process.
            function: The function.
            port: Port of the store where the processes meet.
        """
        # 1. This object is a copy from the main process, so it has no rank yet.
        rank = place_of_worker(index, self.world_size, self._devices[0])
        check_count(rank, self._devices, 1)
        self._take_rank(rank)
        self._on_joined()
        # 2. The strategy knows its device now.
        with self._in_group(rank, port):
            return function()

    def _in_group(self, rank: Rank, port: int | None = None) -> AbstractContextManager[None]:
        return in_group(rank, self.device, timeout=self._timeout, port=port, backend=self._backend)

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
        return reduce_tensor(tensor, self.device, group, reduce_op)

    def all_gather(self, tensor: Any, group: Any | None = None, sync_grads: bool = False) -> Any:
        """Return the values of all processes, along a new first dimension; see `Processes.all_gather`."""
        if not self.is_connected:
            return tensor
        return gather_tensors(tensor, self.device, group, sync_grads)

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


def _run_in_process(group: ProcessGroup, function: Callable[[], T], port: int, index: int) -> T:
    return group.run_as(index, function, port)


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
    tensors = apply_to_collection(value, (int, float), torch.tensor)
    return apply_to_collection(tensors, Tensor, _gather_tensor, device, group, sync_grads)


def _gather_tensor(tensor: Tensor, device: torch.device, group: Any, sync_grads: bool) -> Tensor:
    """Return a tensor of all processes, stacked along a new first dimension."""
    local = tensor.to(device).contiguous()
    if sync_grads and local.requires_grad:
        return _gather_with_graph(local, group)
    gathered = []
    for _ in range(dist.get_world_size(group)):
        gathered.append(torch.empty_like(local))
    dist.all_gather(gathered, local.detach(), group=group)
    return torch.stack(gathered)


def _gather_with_graph(tensor: Tensor, group: Any) -> Tensor:
    """Return the stacked tensors of all processes; their backward reaches the process of each tensor."""
    from torch.distributed.nn.functional import all_gather

    gathered = all_gather(tensor, group)  # type: ignore[no-untyped-call]
    return torch.stack(gathered)
