"""What strategies share that run in several processes: where each stands, and its process group."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import nn
from torchmetrics import Metric

from equipoise.errors import ConfigurationError
from equipoise.parallel.place import Place, find_place
from equipoise.parallel.process_group import joined

__all__ = ["check_count", "compute_metrics_alone", "in_group", "place_of_worker", "refuse_copies", "refuse_machines"]


def check_count(place: Place, devices: Sequence[torch.device], num_nodes: int) -> None:
    """Checks that there is a process for each device.

    Raises:
        ConfigurationError: If there are more or fewer.
    """
    wanted = len(devices) * num_nodes
    uneven = len(devices) == place.local_world_size and num_nodes == place.num_nodes  # machines may have unequal counts
    if wanted != place.world_size and not uneven:
        raise ConfigurationError(
            f"There are {place.world_size} processes, but {len(devices)} devices on each of {num_nodes} machines"
            f" need {wanted}. Leave out devices and num_nodes, which then follow from what started the processes, or"
            " let them agree with it."
        )


def refuse_copies(name: str) -> None:
    """Checks that a strategy which computes in one process was not started in several.

    Args:
        name: The strategy's name.

    Raises:
        ConfigurationError: If there are several processes, each of which would train a copy of its own.
    """
    place = find_place()
    if place is None or place.world_size == 1:
        return
    raise ConfigurationError(
        f"strategy={name!r} computes in one process, but this is one of {place.world_size}: {place.origin}. Each would"
        " train a copy of its own. Take strategy='ddp', or leave strategy out, and they train one model together; or"
        " start one process. For trainings that are independent on purpose: SingleDeviceStrategy(independent=True)."
    )


def refuse_machines(num_nodes: int) -> None:
    """Checks that one machine is enough where nobody has started processes on others.

    Raises:
        ConfigurationError: If there are to be several.
    """
    if num_nodes != 1:
        raise ConfigurationError(
            f"num_nodes={num_nodes}: processes on several machines are started by torchrun or Slurm, but"
            " neither started this one."
        )


def place_of_worker(rank: int, size: int, device: torch.device) -> Place:
    """Where a process stands that the trainer has started; its environment says so, too."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    if device.type == "cuda":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return Place(rank, rank, 0, size, size)


@contextmanager
def in_group(
    place: Place, device: torch.device, *, timeout: float, port: int | None = None, backend: str | None = None
) -> Iterator[None]:
    """Joins the process group; see `parallel.process_group.joined`.

    Args:
        place: Where this process stands.
        device: Where it computes.
        timeout: Seconds for which processes wait for one another.
        port: That of a store on this machine. None: the environment says where to meet.
        backend: Torch's backend.
    """
    vars(rank_zero_only)["rank"] = place.global_rank
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with joined(place, device, timeout=timedelta(seconds=timeout), port=port, backend=backend):
        yield


def compute_metrics_alone(module: nn.Module) -> Callable[[], None]:
    """Lets the metrics of a module ask no other process, where one has seen all data and others do not compute any.

    Returns:
        A function that leaves them as they were.
    """
    before = [(part, part.distributed_available_fn) for part in module.modules() if isinstance(part, Metric)]
    for metric, _ in before:
        metric.distributed_available_fn = _never

    def restore() -> None:
        for metric, available in before:
            metric.distributed_available_fn = available

    return restore


def _never() -> bool:
    return False
