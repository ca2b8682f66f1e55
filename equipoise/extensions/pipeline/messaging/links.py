"""Connections of a process of a pipeline: to the other stages of its replica, and to the same stages of other replicas.

A pipeline that trains several replicas has its processes in a grid. A row is a replica, with a process for each device.
A column has the processes with the same stages of all replicas, and is torch's default group of its processes. So the
main processes, which have the data and run the user's code, form a default group as under DDP.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from equipoise.errors import ConfigurationError
from equipoise.parallel.communication.membership import in_group
from equipoise.parallel.communication.object_exchange import gather_objects
from equipoise.parallel.communication.process_group import group_apart
from equipoise.parallel.communication.rank import Rank

__all__ = ["StageLinks", "in_replica", "index_of_device", "processes_of_replica"]


@dataclass(frozen=True)
class StageLinks:
    """Connections to the other stages of a replica.

    Attributes:
        stages: Group for the values of stages and for commands; None: torch's default group.
        devices: Device of each process, in the order of ranks.
    """

    stages: dist.ProcessGroup | None
    devices: list[torch.device]


@contextmanager
def in_replica(
    place: Rank, count: int, device: torch.device, *, timeout: float, port: int | None, backend: str = "gloo"
) -> Iterator[StageLinks]:
    """Join the processes of a pipeline during a block.

    Args:
        place: Rank of this process among those of all replicas.
        count: Number of processes of a replica.
        device: Device of this process.
        timeout: Seconds for which processes wait for one another.
        port: Port of a store on this machine. None: environment variables name the store.
        backend: Torch's backend for the same stages of several replicas. Default: "gloo".
    """
    if place.world_size == count:
        with _only_replica(place, device, timeout=timeout, port=port) as links:
            yield links
        return
    limit = timedelta(seconds=timeout)
    with in_group(place, device, timeout=timeout, port=port, backend=backend, columns=count) as store:
        # `joined` refuses groups of another program if there are columns.
        assert store is not None
        replica, rank = divmod(place.global_rank, count)
        stages: Any = group_apart(store, f"stages/{replica}", rank, count, limit, local=port is not None)

        # The store has the names of the devices.
        keys = [f"device/{replica}/{index}" for index in range(count)]
        store.set(keys[rank], str(device))
        store.wait(keys, limit)
        yield StageLinks(stages, [torch.device(store.get(key).decode()) for key in keys])
        # No process leaves while another still exchanges with it.
        stages.barrier().wait()


@contextmanager
def _only_replica(place: Rank, device: torch.device, *, timeout: float, port: int | None) -> Iterator[StageLinks]:
    """Join the processes of a pipeline that has one replica; see `in_replica`."""
    with in_group(place, device, timeout=timeout, port=port, backend="gloo"):
        yield StageLinks(None, [torch.device(name) for name in gather_objects(str(device))])


def index_of_device(local_rank: int, count: int, num_devices: int) -> int:
    """Return the index of a process's device among the devices of its machine.

    The devices of a replica stand in the order of their stages, and its first rank has the last of them.

    Args:
        local_rank: Number of the process on its machine.
        count: Number of processes of a replica.
        num_devices: Number of devices of the machine.

    Example:
        >>> [index_of_device(rank, count=2, num_devices=4) for rank in range(4)]
        [1, 0, 3, 2]
    """
    # A replica may have devices of several machines.
    size = min(count, num_devices)
    position = local_rank % num_devices
    first = position - position % size
    # The last replica of a machine may have fewer devices of it.
    last = min(first + size, num_devices) - 1
    return last - (position - first)


def processes_of_replica(total: int, replicas: int) -> int:
    """Return the number of processes of each replica.

    Args:
        total: Number of processes of all replicas, one for each device.
        replicas: Number of replicas.

    Raises:
        ConfigurationError: If the processes cannot be divided, or if a replica would have a single stage.

    Example:
        >>> processes_of_replica(6, replicas=2)
        3
    """
    if replicas == 1:
        return total
    count, rest = divmod(total, replicas)
    if rest or count < 2:
        raise ConfigurationError(
            f"replicas={replicas} need as many devices each, at least 2, but there are {total} devices. Give"
            f" {max(2, count) * replicas}, or other replicas; for replicas on one device each take 'ddp'."
        )
    return count
