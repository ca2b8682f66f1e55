"""The rank of this process, as a process group, torchrun, Slurm or MPI states it."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from equipoise.errors import ConfigurationError

__all__ = ["Rank", "find_rank", "mpi_size", "slurm_job"]

_SHELLS = ("bash", "interactive")  # names of Slurm jobs in which a person types commands
_SPECIAL_STEPS = 0xFFFFFFF0  # Slurm's steps from this number on: the batch script, an interactive shell


@dataclass(frozen=True)
class Rank:
    """Where a process stands.

    Attributes:
        global_rank: Its number among all.
        local_rank: Its number on its machine.
        node_rank: The number of its machine.
        world_size: Number of processes.
        local_world_size: Number of processes on its machine; None if the environment does not say.
        num_nodes: Number of machines; None if the environment does not say.
        origin: A sentence that says from what all this was read, for messages.
    """

    global_rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int | None = None
    num_nodes: int | None = field(default=None, compare=False)
    origin: str = field(default="", compare=False)

    def count_here(self, num_nodes: int | None = None) -> int:
        """Return the number of processes on this machine; they are assumed to be spread evenly if nothing says it.

        Args:
            num_nodes: The number of machines that the user gave. Default: None, the environment's.
        """
        if self.local_world_size is not None:
            return self.local_world_size
        return max(1, self.world_size // (num_nodes or self.num_nodes or 1))

    def count_machines(self, processes_here: int) -> int:
        """Return the number of machines.

        Args:
            processes_here: The number of processes on this machine, to be used if the environment does not say it.
        """
        if self.num_nodes is not None:
            return self.num_nodes
        each = self.local_world_size or processes_here
        return -(-self.world_size // each)


def find_rank(environment: Mapping[str, str] = os.environ) -> Rank | None:
    """Return the place that a process group, torchrun or Slurm has given this process; None if there is none.

    Args:
        environment: The variables to look at.

    Raises:
        ConfigurationError: If variables are missing, or no numbers.
    """
    if dist.is_available() and dist.is_initialized():
        return _of_group(environment)
    if "RANK" in environment or ("LOCAL_RANK" in environment and "WORLD_SIZE" in environment):
        return _of_torchrun(environment)
    place = _of_slurm(environment) if "SLURM_PROCID" in environment else None
    if place is None and (_number(environment, "WORLD_SIZE") or 1) > 1:
        _needed(environment, "RANK")  # each of the processes that are meant would train a copy of its own
    return place


def _of_group(environment: Mapping[str, str]) -> Rank:
    rank = dist.get_rank()
    size = dist.get_world_size()
    local = _number(environment, "LOCAL_RANK")
    node = _number(environment, "GROUP_RANK")
    if node is None:
        node = _number(environment, "NODE_RANK")  # Ray's
    return Rank(
        rank,
        rank if local is None else local,
        node or 0,
        size,
        _number(environment, "LOCAL_WORLD_SIZE"),
        _number(environment, "GROUP_WORLD_SIZE"),
        f"a process group of {size} has begun, in which it is rank {rank}",
    )


# Torchrun, and whatever else sets its variables.


def _of_torchrun(environment: Mapping[str, str]) -> Rank:
    rank = _needed(environment, "RANK")
    size = _needed(environment, "WORLD_SIZE")
    local_size = _number(environment, "LOCAL_WORLD_SIZE")
    local = _number(environment, "LOCAL_RANK")
    if local is None:
        local = rank if local_size is None else rank % local_size
    node = _number(environment, "GROUP_RANK")
    if node is None:
        node = _number(environment, "NODE_RANK") or (rank // local_size if local_size else 0)
    if not 0 <= rank < size:
        raise ConfigurationError(f"The environment says RANK={rank}, but WORLD_SIZE={size}: ranks count from 0.")
    origin = f"the environment says RANK={rank} and WORLD_SIZE={size}, as torchrun sets them"
    return Rank(rank, local, node, size, local_size, _number(environment, "GROUP_WORLD_SIZE"), origin)


# Slurm.


def _of_slurm(environment: Mapping[str, str]) -> Rank | None:
    """Return the place among the tasks that `srun` has started; None in a batch script or in a person's shell."""
    size = _number(environment, "SLURM_STEP_NUM_TASKS") or _number(environment, "SLURM_NTASKS") or 1
    if size == 1 or not _started_by_srun(environment):
        return None
    rank = _needed(environment, "SLURM_PROCID")
    if environment.get("SLURM_JOB_NAME") in _SHELLS:
        if rank == 0:
            return None  # a shell in an allocation: srun did not start this process
        raise ConfigurationError(
            f"A Slurm job named {environment['SLURM_JOB_NAME']!r} counts as a shell, in which one process trains, but"
            f" this is task {rank} of {size}. Give the step another name: srun --job-name=train ..."
        )
    node = _number(environment, "SLURM_NODEID") or 0
    nodes = _number(environment, "SLURM_STEP_NUM_NODES") or _number(environment, "SLURM_NNODES")
    origin = f"Slurm says SLURM_PROCID={rank} and SLURM_NTASKS={size}"
    local = _needed(environment, "SLURM_LOCALID")
    return Rank(rank, local, node, size, _tasks_on_node(environment, node), nodes, origin)


def slurm_job(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the name by which Slurm knows the job of this process; None outside of a job, and in a person's shell.

    Args:
        environment: The variables to look at.

    Example:
        >>> slurm_job({"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "2"})
        '10_2'
    """
    if environment.get("SLURM_JOB_NAME") in _SHELLS:
        return None
    array = environment.get("SLURM_ARRAY_JOB_ID")
    task = environment.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}"
    return environment.get("SLURM_JOB_ID")


def _started_by_srun(environment: Mapping[str, str]) -> bool:
    """Return False in the script of `sbatch` and in the shell of `salloc`, where Slurm sets a rank as well."""
    if "SLURM_JOB_ID" not in environment:
        return True
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    return step.isdigit() and int(step) < _SPECIAL_STEPS


def _tasks_on_node(environment: Mapping[str, str], node: int) -> int | None:
    """Return the number of tasks on a machine, from Slurm's lists such as "4(x2),3"."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        counts: list[int] = []
        for count, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get(name, "")):
            counts += [int(count)] * int(repeats or 1)
        if node < len(counts):
            return counts[node]
    return _number(environment, "SLURM_NTASKS_PER_NODE")


# MPI.


def mpi_size(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of processes that `mpirun` has started; 1 if it did not start this one.

    Open MPI names it in one variable, MPICH and Intel's MPI in another, which Slurm sets as well.

    Args:
        environment: The variables to look at.

    Raises:
        ConfigurationError: If a variable is no number.

    Example:
        >>> mpi_size({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"})
        4
    """
    size = _number(environment, "OMPI_COMM_WORLD_SIZE")
    of_slurm = "SLURM_PROCID" in environment and _started_by_srun(environment)
    if size is None and not of_slurm:
        size = _number(environment, "PMI_SIZE")
    return size or 1


# Numbers.


def _needed(environment: Mapping[str, str], name: str) -> int:
    number = _number(environment, name)
    if number is None:
        present = [
            f"{key}={environment[key]}"
            for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS")
            if key in environment
        ]
        raise ConfigurationError(
            f"The environment says {', '.join(present)}, but not {name}. Start the script with torchrun, which sets all"
            " of them, or unset them to let the trainer start its processes by itself."
        )
    return number


def _number(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name)
    if value is None or not value.strip():
        return None
    try:
        return int(value)
    except ValueError:
        raise ConfigurationError(f"The environment says {name}={value!r}, which is no number.") from None
