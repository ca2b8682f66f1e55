"""Join a process group as one of several processes, after checks of their number."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import nn
from torchmetrics import Metric

from equipoise.errors import ConfigurationError
from equipoise.parallel.communication.process_group import joined
from equipoise.parallel.communication.rank import Rank, find_rank, mpi_size

__all__ = ["check_alone", "check_count", "compute_metrics_alone", "in_group", "place_of_worker", "refuse_copies"]


def check_count(place: Rank, devices: Sequence[torch.device], num_nodes: int) -> None:
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
    place = find_rank()
    if place is None:
        _refuse_mpi()
        return
    if place.world_size == 1:
        return
    raise ConfigurationError(
        f"strategy={name!r} computes in one process, but this is one of {place.world_size}: {place.origin}. Each would"
        " train a copy of its own. Take strategy='ddp', or leave strategy out, and they train one model together; or"
        " start one process. For trainings that are independent on purpose: SingleDeviceStrategy(independent=True)."
    )


def check_alone(num_nodes: int) -> None:
    """Checks that this program is the only one of its run, where nothing in the environment says otherwise.

    Args:
        num_nodes: The number of machines.

    Raises:
        ConfigurationError: If there are to be several machines, or `mpirun` has started several processes.
    """
    if num_nodes != 1:
        raise ConfigurationError(
            f"num_nodes={num_nodes}: processes on several machines are started by torchrun or Slurm, but"
            " neither started this one."
        )
    _refuse_mpi()


def _refuse_mpi() -> None:
    size = mpi_size()
    if size > 1:
        raise ConfigurationError(
            f"mpirun has started this process as one of {size}, but RANK and WORLD_SIZE are not set, so each would"
            " train a copy of its own. Start the script with torchrun; or set RANK, WORLD_SIZE and LOCAL_RANK in each"
            " process from mpirun's variables (Open MPI: OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE and"
            " OMPI_COMM_WORLD_LOCAL_RANK; others: PMI_RANK, PMI_SIZE and MPI_LOCALRANKID), and MASTER_ADDR and"
            " MASTER_PORT to the first machine and a free port of it. For trainings that are independent on purpose:"
            " SingleDeviceStrategy(independent=True), with devices=[...] for each."
        )


def place_of_worker(rank: int, size: int, device: torch.device) -> Rank:
    """Where a process stands that the trainer has started; its environment says so, too."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    if device.type == "cuda":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return Rank(rank, rank, 0, size, size)


@contextmanager
def in_group(
    place: Rank, device: torch.device, *, timeout: float, port: int | None = None, backend: str | None = None
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
