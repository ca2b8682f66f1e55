"""The processes that compute together, as one of them sees them: how many there are, and what they exchange."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from equipoise.errors import CheckpointError

__all__ = ["Processes", "in_main"]

T = TypeVar("T")


class Processes:
    """Starts the processes of a run, or joins them, and exchanges values between them; by default, one process alone.

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
        has_one_state: Whether all processes have the state of one after each step: gradients of a window, logged
            values, metrics and random numbers. Then none of it is reduced, or merged for another number of processes.
            Default: False.
        data_view: Returns `data` where ranks compute batches together. Default: None.

    Example:
        >>> processes = Processes()
        >>> processes.launch(lambda: "result"), processes.gather_objects(3)
        ('result', [3])
    """

    spawns: bool = False
    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    step_together: bool = True
    devices: Sequence[torch.device] = ()
    processes_per_batch: int = 1
    has_one_state: bool = False
    data_view: "Callable[[Processes], Processes] | None" = None

    @property
    def data(self) -> "Processes":
        """The processes that share the data out, one for each batch of a step; this object if each has its own batch.

        Whoever shares out samples, or counts what batches yield, asks these: their ranks, their number, their values.
        """
        return self if self.data_view is None else self.data_view(self)

    @property
    def is_main(self) -> bool:
        """True in the main process, which writes files and logs messages."""
        return self.rank == 0

    def launch(self, function: Callable[[], T], known: Sequence[Any] = ()) -> T:
        """Run `function` in every process and return the result of the main process.

        Args:
            function: The function, without arguments.
            known: Objects of the caller. Where the result refers to one of them, the returned result refers to the
                caller's object and not to a copy.
        """
        return function()

    def ends_after(self, batch: int, window: int) -> bool:
        """Return True if a run ends after this batch; called after each batch once a signal has asked for its end.

        Args:
            batch: Number of training batches so far.
            window: Number of batches from one optimiser step to the next.
        """
        return True

    def mark_failed(self) -> None:
        """Note that this process has failed. From now on it waits for no other process."""

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: str = "mean") -> Any:
        """Reduce a value over all processes. Values that are not tensors are returned unchanged.

        Args:
            tensor: The tensor, of the same shape in all processes; it is not changed.
            group: Process group. Default: all processes.
            reduce_op: "mean", "sum", "min" or "max". Default: "mean".
        """
        return tensor

    def all_gather(self, tensor: Any, group: Any | None = None, sync_grads: bool = False) -> Any:
        """Gather a value of every process, stacked along a new first dimension where there are several.

        Args:
            tensor: A tensor or a collection of tensors and numbers, of the same shapes in all processes.
            group: Process group. Default: all processes.
            sync_grads: Whether gradients flow back to the process that computed a tensor. Default: False.
        """
        return tensor

    def gather_objects(self, value: T) -> list[T]:
        """Return the values of all processes, in the order of their ranks."""
        return [value]

    def broadcast(self, value: T, src: int = 0) -> T:
        """Return the value of process `src`, in every process."""
        return value

    def barrier(self, name: str | None = None) -> None:
        """Wait until every process has reached this call."""


def in_main(function: Callable[[], T], processes: Processes) -> T | None:
    """Return the result of a function that writes, in the main process; None in the others, which wait for its end.

    Args:
        function: The function.
        processes: The processes.

    Raises:
        CheckpointError: In the other processes, if it failed; the main process raises the error of the function.
    """
    try:
        result = function() if processes.is_main else None
    except Exception as error:
        # The others wait for it.
        processes.gather_objects(f"{type(error).__name__}: {error}")
        raise
    problems: list[str | None] = processes.gather_objects(None)
    if problems[0] is not None:
        raise CheckpointError(f"The main process could not write a checkpoint. {problems[0]}")
    return result
