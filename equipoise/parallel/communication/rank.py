"""The rank of this process, as a process group, torchrun, Slurm or MPI states it."""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from equipoise.errors import ConfigurationError

__all__ = ["Rank", "find_rank", "may_be_one_of_several", "mpi_size", "slurm_job"]

# Names of Slurm jobs in which the user types commands.
_SHELLS = ("bash", "interactive")
# Slurm numbers special steps from here on: the batch script, an interactive shell.
_SPECIAL_STEPS = 0xFFFFFFF0


@dataclass(frozen=True)
class Rank:
    """Rank of a process among all processes and on its machine.

    Attributes:
        global_rank: Number of the process among all.
        local_rank: Number of the process on its machine.
        node_rank: Number of the machine.
        world_size: Number of processes.
        local_world_size: Number of processes on the machine; None if the environment does not state it.
        num_nodes: Number of machines; None if the environment does not state it.
        origin: Sentence that names the source of these values, for messages.
    """

    global_rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int | None = None
    num_nodes: int | None = field(default=None, compare=False)
    origin: str = field(default="", compare=False)

    def count_here(self, num_nodes: int | None = None) -> int:
        """Return the number of processes on this machine.

        If the environment does not state it, assume that processes are spread evenly.

        Args:
            num_nodes: Number of machines that the user chose. Default: None, the environment's.
        """
        if self.local_world_size is not None:
            return self.local_world_size
        machines = num_nodes or self.num_nodes or 1
        return max(1, self.world_size // machines)

    def count_machines(self, processes_here: int) -> int:
        """Return the number of machines.

        Args:
            processes_here: Number of processes on this machine, used if the environment does not state it.
        """
        if self.num_nodes is not None:
            return self.num_nodes
        per_machine = self.local_world_size or processes_here
        # Divide and round up.
        return -(-self.world_size // per_machine)


def find_rank(environment: Mapping[str, str] = os.environ) -> Rank | None:
    """Return the rank of this process from its process group, torchrun or Slurm; None if it runs alone.

    Args:
        environment: Environment variables to read. Default: those of this process.

    Raises:
        ConfigurationError: If variables are missing, or no numbers.

    Example:
        >>> rank = find_rank({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
        >>> rank.local_rank, rank.node_rank
        (1, 1)
    """
    if dist.is_available() and dist.is_initialized():
        return _rank_in_group(environment)
    if "RANK" in environment or ("LOCAL_RANK" in environment and "WORLD_SIZE" in environment):
        return _rank_under_torchrun(environment)
    rank = None
    if "SLURM_PROCID" in environment:
        rank = _rank_under_slurm(environment)
    if rank is None and (_number(environment, "WORLD_SIZE") or 1) > 1:
        # Without a rank, each of the processes would train a copy of its own.
        _required_number(environment, "RANK")
    return rank


def may_be_one_of_several() -> bool:
    """Return False if nothing has started this process as one of several; Ray may have, where it is loaded."""
    place = find_rank()
    if place is not None:
        return place.world_size > 1
    return mpi_size() > 1 or "ray.train" in sys.modules


def _rank_in_group(environment: Mapping[str, str]) -> Rank:
    rank = dist.get_rank()
    size = dist.get_world_size()
    local_rank = _number(environment, "LOCAL_RANK")
    if local_rank is None:
        local_rank = rank
    node_rank = _number(environment, "GROUP_RANK")
    if node_rank is None:
        # Ray sets this one.
        node_rank = _number(environment, "NODE_RANK")
    return Rank(
        global_rank=rank,
        local_rank=local_rank,
        node_rank=node_rank or 0,
        world_size=size,
        local_world_size=_number(environment, "LOCAL_WORLD_SIZE"),
        num_nodes=_number(environment, "GROUP_WORLD_SIZE"),
        origin=f"a process group of {size} has begun, in which it is rank {rank}",
    )


# Torchrun, and other launchers that set its variables.


def _rank_under_torchrun(environment: Mapping[str, str]) -> Rank:
    rank = _required_number(environment, "RANK")
    size = _required_number(environment, "WORLD_SIZE")
    local_size = _number(environment, "LOCAL_WORLD_SIZE")
    local_rank = _number(environment, "LOCAL_RANK")
    if local_rank is None:
        local_rank = rank if local_size is None else rank % local_size
    node_rank = _number(environment, "GROUP_RANK")
    if node_rank is None:
        node_rank = _number(environment, "NODE_RANK")
        # Without the machine's number, or with 0, it follows from the rank.
        if not node_rank and local_size:
            node_rank = rank // local_size
    if not 0 <= rank < size:
        raise ConfigurationError(f"The environment says RANK={rank}, but WORLD_SIZE={size}: ranks count from 0.")
    return Rank(
        global_rank=rank,
        local_rank=local_rank,
        node_rank=node_rank or 0,
        world_size=size,
        local_world_size=local_size,
        num_nodes=_number(environment, "GROUP_WORLD_SIZE"),
        origin=f"the environment says RANK={rank} and WORLD_SIZE={size}, as torchrun sets them",
    )


# Slurm.


def _rank_under_slurm(environment: Mapping[str, str]) -> Rank | None:
    """Return the rank among the tasks that `srun` has started; None in a batch script or in the user's shell."""
    size = _number(environment, "SLURM_STEP_NUM_TASKS") or _number(environment, "SLURM_NTASKS") or 1
    if size == 1 or not _started_by_srun(environment):
        return None
    rank = _required_number(environment, "SLURM_PROCID")
    if environment.get("SLURM_JOB_NAME") in _SHELLS:
        if rank == 0:
            # This is a shell in an allocation: srun did not start this process.
            return None
        raise ConfigurationError(
            f"A Slurm job named {environment['SLURM_JOB_NAME']!r} counts as a shell, in which one process trains, but"
            f" this is task {rank} of {size}. Give the step another name: srun --job-name=train ..."
        )
    node_rank = _number(environment, "SLURM_NODEID") or 0
    num_nodes = _number(environment, "SLURM_STEP_NUM_NODES") or _number(environment, "SLURM_NNODES")
    return Rank(
        global_rank=rank,
        local_rank=_required_number(environment, "SLURM_LOCALID"),
        node_rank=node_rank,
        world_size=size,
        local_world_size=_tasks_on_node(environment, node_rank),
        num_nodes=num_nodes,
        origin=f"Slurm says SLURM_PROCID={rank} and SLURM_NTASKS={size}",
    )


def slurm_job(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return Slurm's name for the job of this process; None outside of a job, and in the user's shell.

    Args:
        environment: Environment variables to read. Default: those of this process.

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
    """Return True for a task of `srun`. Slurm sets a rank in a script of `sbatch` and a shell of `salloc` as well."""
    if "SLURM_JOB_ID" not in environment:
        return True
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    return step.isdigit() and int(step) < _SPECIAL_STEPS


def _tasks_on_node(environment: Mapping[str, str], node: int) -> int | None:
    """Return the number of tasks on a machine, from Slurm's lists such as "4(x2),3"."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        counts: list[int] = []
        groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get(name, ""))
        for count, repeats in groups:
            counts += [int(count)] * int(repeats or 1)
        if node < len(counts):
            return counts[node]
    return _number(environment, "SLURM_NTASKS_PER_NODE")


# MPI.


def mpi_size(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of processes that `mpirun` has started; 1 if it did not start this one.

    Open MPI states it in one variable, MPICH and Intel's MPI in another, which Slurm sets as well.

    Args:
        environment: Environment variables to read. Default: those of this process.

    Raises:
        ConfigurationError: If a variable is no number.

    Example:
        >>> mpi_size({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"})
        4
    """
    size = _number(environment, "OMPI_COMM_WORLD_SIZE")
    is_slurm_task = "SLURM_PROCID" in environment and _started_by_srun(environment)
    if size is None and not is_slurm_task:
        size = _number(environment, "PMI_SIZE")
    return size or 1


# Numbers.


def _required_number(environment: Mapping[str, str], name: str) -> int:
    number = _number(environment, name)
    if number is not None:
        return number
    present = [
        f"{key}={environment[key]}"
        for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS")
        if key in environment
    ]
    raise ConfigurationError(
        f"The environment says {', '.join(present)}, but not {name}. Start the script with torchrun, which sets all"
        " of them, or unset them to let the trainer start its processes by itself."
    )


def _number(environment: Mapping[str, str], name: str) -> int | None:
    """Return the number in a variable; None if it is unset or empty."""
    value = environment.get(name)
    if value is None or not value.strip():
        return None
    try:
        return int(value)
    except ValueError:
        raise ConfigurationError(f"The environment says {name}={value!r}, which is no number.") from None
