"""Join a process group as one of several processes, after checks of their number."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torchmetrics import Metric

from equipoise.errors import ConfigurationError
from equipoise.parallel.communication.rank import Rank, find_rank, mpi_size
from equipoise.parallel.ray_context import ray_world_size

__all__ = ["check_alone", "check_count", "compute_metrics_alone", "in_group", "place_of_worker", "refuse_copies"]


# Checks


def check_count(place: Rank, devices: Sequence[torch.device], num_nodes: int) -> None:
    """Check that the number of processes is that of the devices.

    Args:
        place: Rank of this process.
        devices: Devices on each machine.
        num_nodes: Number of machines.

    Raises:
        ConfigurationError: If there are more or fewer processes than devices.
    """
    num_required = len(devices) * num_nodes
    if num_required == place.world_size:
        return
    # Machines may have unequal numbers of devices; then those of this machine must agree.
    if len(devices) == place.local_world_size and num_nodes == place.num_nodes:
        return
    raise ConfigurationError(
        f"There are {place.world_size} processes, but {len(devices)} devices on each of {num_nodes} machines"
        f" need {num_required}. Leave out devices and num_nodes, which then follow from what started the processes, or"
        " let them agree with it."
    )


def refuse_copies(name: str) -> None:
    """Check that a strategy which computes in one process was not started in several.

    Args:
        name: Name of the strategy. Its process may be one of several.

    Raises:
        ConfigurationError: If there are several processes, each of which would train a separate copy.
    """
    place = find_rank()
    if place is None:
        _refuse_mpi()
        _refuse_ray_without_group()
        return
    raise ConfigurationError(
        f"strategy={name!r} computes in one process, but this is one of {place.world_size}: {place.origin}. Each would"
        " train a copy of its own. Take strategy='ddp', or leave strategy out, and they train one model together; or"
        " start one process. For trainings that are independent on purpose: SingleDeviceStrategy(independent=True)."
    )


def check_alone(num_nodes: int) -> None:
    """Check that a process without a rank in its environment is the only one of its run.

    Args:
        num_nodes: Number of machines that the user chose.

    Raises:
        ConfigurationError: If the user chose several machines, or `mpirun` has started several processes.
    """
    if num_nodes != 1:
        raise ConfigurationError(
            f"num_nodes={num_nodes}: processes on several machines are started by torchrun or Slurm, but"
            " neither started this one."
        )
    _refuse_mpi()
    _refuse_ray_without_group()


def _refuse_mpi() -> None:
    """Raise if `mpirun` has started several processes, since its variables do not let them meet."""
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


def _refuse_ray_without_group() -> None:
    """Raise if Ray Train has started several workers without a process group of torch, in which they could meet."""
    size = ray_world_size()
    if size > 1:
        raise ConfigurationError(
            f"Ray Train has started this process as one of {size} workers, but without a process group of torch, so"
            " each would train a copy of its own. Start them by ray.train.torch.TorchTrainer. For trainings that are"
            " independent on purpose: SingleDeviceStrategy(independent=True)."
        )


# Membership


def place_of_worker(rank: int, size: int, device: torch.device) -> Rank:
    """Return the rank of a worker on this machine, and set it in the worker's environment.

    Args:
        rank: Number of the worker, from 0.
        size: Number of workers.
        device: Device of the worker.
    """
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    if device.type == "cuda":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return Rank(global_rank=rank, local_rank=rank, node_rank=0, world_size=size, local_world_size=size)


@contextmanager
def in_group(
    place: Rank,
    device: torch.device,
    *,
    timeout: float,
    port: int | None = None,
    backend: str | None = None,
    columns: int = 1,
) -> Iterator[Store | None]:
    """Join the process group during a block; see `process_group.joined`.

    Args:
        place: Rank of this process.
        device: Device of this process.
        timeout: Seconds for which processes wait for one another.
        port: Port of a store on this machine. Default: None, the environment states where to meet.
        backend: Torch's backend. Default: "nccl" for CUDA, else "gloo".
        columns: Number of groups into which the processes are divided. Default: 1.

    Yields:
        The store at which all processes have met; None if another program began the group.
    """
    from equipoise.parallel.communication.process_group import joined

    # Lightning's messages for rank 0 read the rank from this attribute.
    vars(rank_zero_only)["rank"] = place.global_rank
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit = timedelta(seconds=timeout)
    with joined(place, device, timeout=limit, port=port, backend=backend, columns=columns) as store:
        yield store


# Metrics of one process


def compute_metrics_alone(module: nn.Module) -> Callable[[], None]:
    """Keep the metrics of a module from synchronising, because one process updates them with all data.

    Args:
        module: Module whose metrics, and those of its submodules, compute alone.

    Returns:
        Function that lets the metrics synchronise as before.
    """
    # The functions by which a metric decides whether to synchronise.
    original_functions: list[tuple[Metric, Any]] = []
    for submodule in module.modules():
        if isinstance(submodule, Metric):
            original_functions.append((submodule, submodule.distributed_available_fn))
            submodule.distributed_available_fn = _never_available

    def restore() -> None:
        for metric, function in original_functions:
            metric.distributed_available_fn = function

    return restore


def _never_available() -> bool:
    return False
