"""The processes among which data is divided, where several successive ranks compute each batch together."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor

from equipoise.parallel.communication.processes import Processes

__all__ = ["DataProcesses"]

T = TypeVar("T")


class DataProcesses(Processes):
    """One process for each batch of a step: of the successive ranks that compute a batch together, the first.

    All processes make the calls, and all of them receive the values of those first ranks. Where all processes compute
    one batch, nothing is exchanged, as in a run of one process.

    Args:
        processes: All processes.

    Example:
        >>> DataProcesses(Processes()).gather_objects(3)
        [3]
    """

    def __init__(self, processes: Processes) -> None:
        self._all = processes
        self._stride = processes.processes_per_batch
        self.spawns = processes.spawns
        self.rank, self._place = divmod(processes.rank, self._stride)
        self.local_rank = processes.local_rank
        self.node_rank = processes.node_rank
        self.world_size = processes.world_size // self._stride
        self.step_together = processes.step_together
        self.devices: Sequence[torch.device] = processes.devices

    @property
    def is_main(self) -> bool:
        """True in the main process, which is one of all."""
        return self._all.is_main

    def launch(self, function: Callable[[], T], known: Sequence[Any] = ()) -> T:
        """Run a function in every process, not in the first ranks alone; see `Processes.launch`."""
        return self._all.launch(function, known)

    def ends_after(self, batch: int, window: int) -> bool:
        """Return True if the run ends after this batch; see `Processes.ends_after`."""
        return self._all.ends_after(batch, window)

    def mark_failed(self) -> None:
        """Note that this process has failed; see `Processes.mark_failed`."""
        self._all.mark_failed()

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: str = "mean") -> Any:
        """Reduce a value, of which each batch has one; see `Processes.reduce`."""
        if self.world_size == 1 or not isinstance(tensor, Tensor):
            return tensor
        if reduce_op in ("min", "max"):
            return self._all.reduce(tensor, group, reduce_op)
        counted = tensor
        if self._place:
            # A product with zero would keep NaN.
            counted = torch.zeros_like(tensor)
        total = self._all.reduce(counted, group, "sum")
        if reduce_op == "sum":
            return total
        return total / self.world_size

    def all_gather(self, tensor: Any, group: Any | None = None, sync_grads: bool = False) -> Any:
        """Gather a value, of which each batch has one; see `Processes.all_gather`."""
        if self.world_size == 1:
            return tensor
        gathered = self._all.all_gather(tensor, group, sync_grads)
        return apply_to_collection(gathered, Tensor, self._first_of_each)

    def _first_of_each(self, values: Any) -> Any:
        # One of the successive ranks that compute a batch together counts.
        return values[:: self._stride]

    def gather_objects(self, value: T) -> list[T]:
        """Return the values of the first ranks; see `Processes.gather_objects`."""
        if self.world_size == 1:
            return [value]
        firsts: list[T] = self._first_of_each(self._all.gather_objects(value))
        return firsts

    def broadcast(self, value: T, src: int = 0) -> T:
        """Return the value of the first rank of batch `src`; see `Processes.broadcast`."""
        if self.world_size == 1:
            return value
        return self._all.broadcast(value, src * self._stride)

    def barrier(self, name: str | None = None) -> None:
        """Wait until every process has reached this call; see `Processes.barrier`."""
        self._all.barrier(name)
