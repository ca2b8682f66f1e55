"""A process for each device: each is started here or by a launcher, and joins the process group."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch

from equipoise.parallel.communication.connected_processes import ConnectedProcesses
from equipoise.parallel.communication.membership import check_alone, check_count, in_group, place_of_worker
from equipoise.parallel.communication.process_group import StoreServer, follows_from_another
from equipoise.parallel.communication.rank import Rank, find_rank
from equipoise.parallel.workers.availability import IN_ONE_PROCESS, require_workers
from equipoise.parallel.workers.launch import launch

__all__ = ["ProcessGroup"]

T = TypeVar("T")


class ProcessGroup(ConnectedProcesses):
    """A process for each device, started here or by a launcher such as torchrun.

    Args:
        devices: The devices of this machine, one for each process.
        num_nodes: Number of machines.
        timeout: Seconds for which processes wait for one another.
        backend: Torch's backend. None: "nccl" on CUDA, else "gloo".
        on_joined: Function that is called in a process that was started here, once its rank is known.
        step_together: Whether the processes exchange gradients in each step. Default: True.
        has_one_state: Whether all processes have the state of one after each step. Default: False.

    Attributes:
        device: The device of this process.

    Raises:
        ConfigurationError: If the number of processes that a launcher has started is not that of the devices, or this
            system cannot start several.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        num_nodes: int,
        *,
        timeout: float,
        backend: str | None,
        on_joined: Callable[[], None],
        step_together: bool = True,
        has_one_state: bool = False,
    ) -> None:
        super().__init__()
        self.devices = tuple(devices)
        self._timeout = timeout
        self._backend = backend
        self._on_joined = on_joined
        self.step_together = step_together
        self.has_one_state = has_one_state
        # The rank of this process, if a launcher has started it.
        self._launched_rank = find_rank()
        if self._launched_rank is None:
            check_alone(num_nodes)
            self.world_size = len(self.devices)
            self.spawns = self.world_size > 1
            if self.spawns:
                require_workers(f"A run in {self.world_size} processes", IN_ONE_PROCESS)
            self.device = self.devices[0]
        else:
            check_count(self._launched_rank, self.devices, num_nodes)
            self._take_rank(self._launched_rank)

    def _take_rank(self, rank: Rank) -> None:
        self.rank = rank.global_rank
        self.local_rank = rank.local_rank
        self.node_rank = rank.node_rank
        self.world_size = rank.world_size
        self.device = self.devices[rank.local_rank % len(self.devices)]

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
            run = partial(self.run_as, function=function, port=store.port)
            result: T = launch(
                run, self.world_size, known=known, is_consequence=follows_from_another, timeout=self._timeout
            )
        return result

    def run_as(self, index: int, function: Callable[[], T], port: int) -> T:
        """Run a function in a process that was started here."""
        # 1. This object is a copy from the main process, so it has no rank yet.
        rank = place_of_worker(index, self.world_size, self.devices[0])
        check_count(rank, self.devices, 1)
        self._take_rank(rank)
        self._on_joined()
        # 2. The strategy knows its device now.
        with self._in_group(rank, port):
            return function()

    def _in_group(self, rank: Rank, port: int | None = None) -> AbstractContextManager[Any]:
        return in_group(rank, self.device, timeout=self._timeout, port=port, backend=self._backend)
