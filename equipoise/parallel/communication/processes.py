"""The processes that compute together, as one of them sees them: how many there are, and what they exchange."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor

__all__ = ["DataProcesses", "Processes", "SingleProcess"]

T = TypeVar("T")


class Processes(ABC):
    """Starts the processes of a run, or joins them, and exchanges values between them.

    Attributes:
        spawns: True if `launch` runs functions in other processes than the caller's.
        rank: Number of this process among all.
        local_rank: Number of this process on its machine.
        node_rank: Number of this machine.
        world_size: Number of processes.
        step_together: Whether the processes exchange gradients in each step. Default: True.
        devices: Devices of the processes on this machine, by local rank; empty for a single process, whose devices are
            those of its strategy.
        processes_per_batch: Number of successive ranks that compute each batch together. Default: 1.
    """

    spawns: bool = False
    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    step_together: bool = True
    devices: Sequence[torch.device] = ()
    processes_per_batch: int = 1

    @property
    def data(self) -> "Processes":
        """The processes that share the data out, one for each batch of a step; this object if each has its own batch.

        Whoever shares out samples, or counts what batches yield, asks these: their ranks, their number, their values.
        """
        if self.processes_per_batch == 1:
            return self
        return DataProcesses(self)

    @property
    def is_main(self) -> bool:
        """True in the main process, which writes files and logs messages."""
        return self.rank == 0

    @abstractmethod
    def launch(self, function: Callable[[], T], known: Sequence[Any] = ()) -> T:
        """Run `function` in every process and return the result of the main process.

        Args:
            function: The function, without arguments.
            known: Objects of the caller. Where the result refers to one of them, the returned result refers to the
                caller's object and not to a copy.
        """

    @abstractmethod
    def ends_after(self, batch: int, window: int) -> bool:
        """Return True if a run ends after this batch; called after each batch once a signal has asked for its end.

        Args:
            batch: Number of training batches so far.
            window: Number of batches from one optimiser step to the next.
        """

    @abstractmethod
    def mark_failed(self) -> None:
        """Note that this process has failed. From now on it waits for no other process."""

    @abstractmethod
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: str = "mean") -> Any:
        """Reduce a value over all processes. Values that are not tensors are returned unchanged.

        Args:
            tensor: The tensor, of the same shape in all processes; it is not changed.
            group: Process group. Default: all processes.
            reduce_op: "mean", "sum", "min" or "max". Default: "mean".
        """

    @abstractmethod
    def all_gather(self, tensor: Any, group: Any | None = None, sync_grads: bool = False) -> Any:
        """Gather a value of every process, stacked along a new first dimension where there are several.

        Args:
            tensor: A tensor or a collection of tensors and numbers, of the same shapes in all processes.
            group: Process group. Default: all processes.
            sync_grads: Whether gradients flow back to the process that computed a tensor. Default: False.
        """

    @abstractmethod
    def gather_objects(self, value: T) -> list[T]:
        """Return the values of all processes, in the order of their ranks."""

    @abstractmethod
    def broadcast(self, value: T, src: int = 0) -> T:
        """Return the value of process `src`, in every process."""

    @abstractmethod
    def barrier(self, name: str | None = None) -> None:
        """Wait until every process has reached this call."""


class SingleProcess(Processes):
    """The caller's process alone: a function is called here, and a value of all processes is its own.

    Example:
        >>> processes = SingleProcess()
        >>> processes.launch(lambda: "result")
        'result'
        >>> processes.gather_objects(3)
        [3]
    """

    def launch(self, function: Callable[[], T], known: Sequence[Any] = ()) -> T:
        """Call the function; see `Processes.launch`."""
        return function()

    def ends_after(self, batch: int, window: int) -> bool:
        """Return True: no other process needs to agree; see `Processes.ends_after`."""
        return True

    def mark_failed(self) -> None:
        """Do nothing: this process waits for no other; see `Processes.mark_failed`."""

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: str = "mean") -> Any:
        """Return the value; see `Processes.reduce`."""
        return tensor

    def all_gather(self, tensor: Any, group: Any | None = None, sync_grads: bool = False) -> Any:
        """Return the value; see `Processes.all_gather`."""
        return tensor

    def gather_objects(self, value: T) -> list[T]:
        """Return the value in a list; see `Processes.gather_objects`."""
        return [value]

    def broadcast(self, value: T, src: int = 0) -> T:
        """Return the value; see `Processes.broadcast`."""
        return value

    def barrier(self, name: str | None = None) -> None:
        """Return immediately; see `Processes.barrier`."""


class DataProcesses(Processes):
    """One process for each batch of a step: of the successive ranks that compute a batch together, the first.

    All processes make the calls, and all of them receive the values of those first ranks. Where all processes compute
    one batch, nothing is exchanged, as in a run of one process.

    Args:
        processes: All processes.

    Example:
        >>> DataProcesses(SingleProcess()).gather_objects(3)
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
        # A product with zero would keep what is not a number.
        counted = torch.zeros_like(tensor) if self._place else tensor
        total = self._all.reduce(counted, group, "sum")
        return total if reduce_op == "sum" else total / self.world_size

    def all_gather(self, tensor: Any, group: Any | None = None, sync_grads: bool = False) -> Any:
        """Gather a value, of which each batch has one; see `Processes.all_gather`."""
        if self.world_size == 1:
            return tensor
        gathered = self._all.all_gather(tensor, group, sync_grads)
        return apply_to_collection(gathered, Tensor, lambda values: values[:: self._stride])

    def gather_objects(self, value: T) -> list[T]:
        """Return the values of the first ranks; see `Processes.gather_objects`."""
        if self.world_size == 1:
            return [value]
        return self._all.gather_objects(value)[:: self._stride]

    def broadcast(self, value: T, src: int = 0) -> T:
        """Return the value of the first rank of batch `src`; see `Processes.broadcast`."""
        if self.world_size == 1:
            return value
        return self._all.broadcast(value, src * self._stride)

    def barrier(self, name: str | None = None) -> None:
        """Wait until every process has reached this call; see `Processes.barrier`."""
        self._all.barrier(name)
