"""Start the processes of a pipeline, give them their stages, and end them together."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from equipoise.errors import StepError
from equipoise.parallel.communication.heartbeat import await_end, heard, sending
from equipoise.parallel.communication.membership import check_alone, check_count, in_group, place_of_worker
from equipoise.parallel.communication.object_exchange import gather_objects
from equipoise.parallel.communication.process_group import StoreServer, another_group, follows_from_another
from equipoise.parallel.communication.processes import SingleProcess
from equipoise.parallel.communication.rank import Rank, find_rank
from equipoise.parallel.payload.shared_payload import dumps, loads
from equipoise.parallel.workers.launch import launch
from equipoise.parallel.workers.preloading import preload
from equipoise.pipeline.processes.client import StageClient
from equipoise.pipeline.processes.messages import Messenger
from equipoise.pipeline.processes.worker import StageWorker

__all__ = ["StageLaunch"]

T = TypeVar("T")
preload("equipoise.strategies.pipeline")
# Seconds that the failed main process has to end before the other processes do.
_FAREWELL = 10.0
_WRITTEN = "more than one element of the written-to tensor"  # how torch refuses to write to `nothing_like`


class FirstProcessFailed(dist.DistError):
    """What ends a worker when the first process has failed; that one tells why."""


class StageLaunch(SingleProcess):
    """A process for each device with its stages, the first with the last of them.

    The first process has all data and computes all values of a run, so nothing is exchanged for these.

    Args:
        devices: The devices of this machine, in the order of their stages.
        num_nodes: The number of machines.
        timeout: Seconds for which processes wait for what is due.
        on_joined: Function that is called in the first process, once the others are there.

    Attributes:
        count: How many there are, on all machines.
        device: That of this process; before any has started, that of the first one.
        processes: The others, seen from the first process; None elsewhere.
    """

    def __init__(
        self, devices: Sequence[torch.device], num_nodes: int, timeout: float, *, on_joined: Callable[[], None]
    ) -> None:
        self._devices, self._timeout = tuple(devices), timeout
        self._on_joined = on_joined
        self.count = len(devices) * num_nodes
        self._place = find_rank()
        if self._place is None:
            check_alone(num_nodes)
        else:
            check_count(self._place, devices, num_nodes)
            self._take_rank(self._place)
        self.spawns = self.count > 1
        self.device = self._device_of(0 if self._place is None else self._place.local_rank)
        self.processes: StageClient | None = None

    def _take_rank(self, rank: Rank) -> None:
        self.rank = rank.global_rank
        self.local_rank = rank.local_rank
        self.node_rank = rank.node_rank

    def _device_of(self, local_rank: int) -> torch.device:
        return self._devices[(local_rank - 1) % len(self._devices)]  # the first process has the last one

    def launch(self, function: Callable[[], T], known: Sequence[Any] = ()) -> T:
        """Runs a function in the first process while the others serve; returns its result in all that were joined."""
        if self.count == 1:
            return function()
        if self._place is not None:
            return self.run(self._place, None, function, known)
        with StoreServer() as store:
            start = partial(_run_in_process, self, function, store.port)
            answer: T = launch(start, self.count, known=known, is_consequence=follows_from_another)
        return answer

    def place_in_worker(self, rank: int) -> Rank:
        """Where a process stands that the trainer has started."""
        return place_of_worker(rank, self.count, self._devices[0])

    def run(
        self,
        place: Rank,
        port: int | None,
        function: Callable[[], T],
        known: Sequence[Any] | None,
    ) -> T:
        """Joins the others and leads them, or serves.

        Args:
            place: Where this process stands.
            port: That of a store on this machine; None: the environment says where to meet.
            function: What the first process runs.
            known: Objects of this process's that an answer may refer to; None: only the first returns one.
        """
        self.device = self._device_of(place.local_rank)
        rank = place.global_rank
        self._take_rank(place)
        limit = timedelta(seconds=self._timeout)
        with (
            in_group(place, self.device, timeout=self._timeout, port=port, backend="gloo"),
            another_group(limit, local=port is not None) as beats,
        ):
            devices = gather_objects(str(self.device))
            messenger = Messenger(self._timeout)
            if rank:
                with _unsignalled(), heard(beats, self._timeout):
                    content = StageWorker(
                        messenger, rank - 1, self.count, self.device, torch.device(devices[rank - 1])
                    ).serve()
                if content is None:
                    if port is None:
                        # Launchers such as torchrun report the process that ends first: the one that names the cause.
                        await_end(beats, _FAREWELL)
                    raise FirstProcessFailed("connection closed by peer: the first process has failed.")
                return loads(content, known or ()) if known is not None else None  # type: ignore[return-value]
            self.processes = StageClient(messenger, [torch.device(name) for name in (*devices[1:], devices[0])])
            self._on_joined()
            with sending(beats, self.count, self._timeout, lambda: messenger.waits):
                return self._lead(self.processes, function, known)

    def _lead(self, processes: StageClient, function: Callable[[], T], known: Sequence[Any] | None) -> T:
        content: Any = None
        try:
            result = function()
            content = b"" if known is None else dumps(result, known)
            return result
        except RuntimeError as error:
            if _WRITTEN not in str(error):
                raise
            raise StepError(
                "A parameter of another stage was written to, in a callback or a hook, but under engine='processes' it"
                " lies in another process. Take engine='threads'."
            ) from error
        finally:
            self.processes = None
            if not processes.messenger.broken:
                processes.tell_all("end", content)
                processes.messenger.flush()

    def __getstate__(self) -> dict[str, Any]:
        """Where things are; nothing that belongs to a run."""
        return {**vars(self), "processes": None}


def _run_in_process(others: StageLaunch, function: Callable[[], T], port: int, rank: int) -> T:
    """What a process does that the trainer has started."""
    return others.run(others.place_in_worker(rank), port, function, None)


@contextmanager
def _unsignalled() -> Iterator[None]:
    """While the first process decides when the run ends, whatever signals come."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
