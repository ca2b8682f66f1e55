"""Start the processes of a pipeline, give them their stages, and end them together."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from equipoise.errors import StepError
from equipoise.extensions.pipeline.messaging.commands import COMMAND
from equipoise.extensions.pipeline.messaging.links import in_replica, index_of_device, processes_of_replica
from equipoise.extensions.pipeline.messaging.messages import Messenger
from equipoise.extensions.pipeline.processes.main_process.client import StageClient
from equipoise.extensions.pipeline.processes.workers.stage_worker import StageWorker
from equipoise.parallel.communication.connected_processes import ConnectedProcesses
from equipoise.parallel.communication.membership import check_alone, check_count, place_of_worker
from equipoise.parallel.communication.process_group import StoreServer, follows_from_another
from equipoise.parallel.communication.rank import Rank, find_rank
from equipoise.parallel.payload.object_bytes import dumps, loads
from equipoise.parallel.workers.availability import require_workers
from equipoise.parallel.workers.launch import launch
from equipoise.parallel.workers.preloading import preload

__all__ = ["StageLaunch"]

T = TypeVar("T")
preload("equipoise.extensions.pipeline.strategy.strategy")
# Seconds that the failed main process has to end before the workers do.
_FAREWELL = 10.0
# torch's error for writing to a parameter of another process, which is a `placeholder`.
_WRITE_ERROR = "more than one element of the written-to tensor"


class FirstProcessFailed(dist.DistError):
    """Raised in a worker when the main process has failed; the main process reports the cause."""


class StageLaunch(ConnectedProcesses):
    """A process for each device and its stages; the main process of each replica has the last device.

    A main process has all data of its replica and computes all values of a run. The main processes of all replicas
    exchange these values, and their number is `world_size`.

    Args:
        devices: The devices of this machine, in the order of their stages, one replica after the other.
        num_nodes: Number of machines.
        timeout: Longest time in seconds for which a process waits for a value that is due.
        replicas: Number of replicas. Default: 1.
        on_joined: Function that is called in the main process after the workers have started.

    Attributes:
        count: Number of processes of a replica, on all machines.
        device: Device of this process; before the processes start, that of the main process.
        processes: The workers, in the main process during a run; None otherwise.

    Raises:
        ConfigurationError: If the number of processes does not fit the devices or the replicas, or this system cannot
            start several.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        num_nodes: int,
        timeout: float,
        replicas: int = 1,
        *,
        on_joined: Callable[[], None],
    ) -> None:
        super().__init__()
        self._devices = tuple(devices)
        self._timeout = timeout
        self._on_joined = on_joined
        self.world_size = replicas
        self._total = len(devices) * num_nodes
        # Rank that a launcher such as torchrun has given this process; None without a launcher.
        self._launched_rank = find_rank()
        if self._launched_rank is not None:
            check_count(self._launched_rank, devices, num_nodes)
            self._total = self._launched_rank.world_size
        self.count = processes_of_replica(self._total, replicas)
        self.spawns = self._total > 1
        self.device = self._device_of(0)
        if self._launched_rank is None:
            check_alone(num_nodes)
            if self.spawns:
                require_workers("engine='processes'", "Take engine='threads', which computes all stages in one process")
        else:
            self._take_rank(self._launched_rank)
        self.processes: StageClient | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a pickled or copied object: the workers stay in the process of their run."""
        return {**vars(self), "processes": None}

    def _take_rank(self, rank: Rank) -> None:
        """Set the device and the ranks of this process. Main processes have the first ranks."""
        replica, rank_in_replica = divmod(rank.global_rank, self.count)
        self.rank = replica
        self.local_rank = rank.local_rank // self.count
        if rank_in_replica > 0:
            workers_before = replica * (self.count - 1) + rank_in_replica - 1
            self.rank = self.world_size + workers_before
            self.local_rank = rank.local_rank
        self.node_rank = rank.node_rank
        self.device = self._device_of(rank.local_rank)

    def _device_of(self, local_rank: int) -> torch.device:
        return self._devices[index_of_device(local_rank, self.count, len(self._devices))]

    def launch(self, function: Callable[[], T], known: Sequence[Any] = ()) -> T:
        """Run a function in the main process while the workers serve.

        Args:
            function: The function.
            known: Objects of this process to which the result may refer.

        Returns:
            The result of the function, in all processes that a launcher has started.
        """
        if self._total == 1:
            return function()
        if self._launched_rank is not None:
            return self.run(self._launched_rank, None, function, known)
        with StoreServer() as store:
            start = partial(self._run_in_worker, function, store.port)
            result: T = launch(
                start, self._total, known=known, is_consequence=follows_from_another, timeout=self._timeout
            )
        return result

    def _run_in_worker(self, function: Callable[[], T], port: int, rank: int) -> T:
        """Run in a process that the trainer has started, with this global rank."""
        return self.run(place_of_worker(rank, self._total, self._devices[0]), port, function, None)

    def run(
        self,
        rank: Rank,
        port: int | None,
        function: Callable[[], T],
        shared_objects: Sequence[Any] | None,
    ) -> T:
        """Join the other processes, and lead them or serve.

        Args:
            rank: Rank of this process.
            port: Port of a store on this machine; None: environment variables name the store.
            function: Function of the main process.
            shared_objects: Objects of this process to which the result may refer; None: workers return None.

        Raises:
            FirstProcessFailed: In a worker, if the main process has failed.
        """
        # 1. Join the other processes.
        self._take_rank(rank)
        # NCCL needs a device of its own for each process, and all processes need the same backend.
        are_on_cuda = all(device.type == "cuda" for device in self._devices)
        are_distinct = len(set(self._devices)) == len(self._devices)
        backend = "nccl" if are_on_cuda and are_distinct else "gloo"
        with in_replica(rank, self.count, self.device, timeout=self._timeout, port=port, backend=backend) as links:
            messenger = Messenger(self._timeout, links.stages)
            rank_in_replica = rank.global_rank % self.count

            # 2. Serve as a worker until the run ends.
            if rank_in_replica > 0:
                with _signals_ignored():
                    content = self._serve(messenger, rank_in_replica, links.devices)
                if content is None and port is None:
                    _await_end(links.stages)
                if content is None:
                    raise FirstProcessFailed("connection closed by peer: the first process has failed.")
                if shared_objects is None:
                    return None  # type: ignore[return-value]
                return loads(content, shared_objects)  # type: ignore[no-any-return]

            # 3. Lead as the main process, whose stages come last.
            client = StageClient(messenger, links.devices[::-1], self.rank)
            self.processes = client
            self._on_joined()
            return self._lead(client, function, shared_objects)

    def _serve(self, messenger: Messenger, rank: int, devices: Sequence[torch.device]) -> bytes | None:
        """Serve as a worker, and return the pickled result of the run; None if the main process has failed."""
        stage = self.count - 1 - rank
        # The first stage receives its inputs from the main process.
        rank_before = (rank + 1) % self.count
        worker = StageWorker(messenger, stage, self.count, self.device, devices[rank_before])
        content: bytes | None = worker.serve()
        return content

    def _lead(
        self,
        client: StageClient,
        function: Callable[[], T],
        shared_objects: Sequence[Any] | None,
    ) -> T:
        content: Any = None
        try:
            result = function()
            # If pickling fails, the workers receive None.
            if shared_objects is None:
                content = b""
            else:
                content = dumps(result, shared_objects)
            return result
        except RuntimeError as error:
            if _WRITE_ERROR not in str(error):
                raise
            raise StepError(
                "A parameter of another stage was written to, in a callback or a hook, but under engine='processes' it"
                " lies in another process. Take engine='threads'."
            ) from error
        finally:
            self.processes = None
            if not client.commands.messenger.broken:
                client.commands.send_to_all("end", content)
                client.commands.messenger.flush()


def _await_end(group: dist.ProcessGroup | None) -> None:
    """Wait until the main process has ended, which closes its connections, but not for long: it may continue.

    Launchers such as torchrun report the process that ends first: the one that names the cause.
    """
    # Nothing more is sent.
    with suppress(RuntimeError):
        work = dist.irecv(torch.empty(1), group=group, group_src=0, tag=COMMAND)
        assert work is not None
        work.wait(timedelta(seconds=_FAREWELL))


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """Ignore signals in a worker: the main process decides when a run ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        handlers[number] = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
