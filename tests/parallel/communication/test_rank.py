"""Rank of a process, read from the variables that torchrun and Slurm set."""

import pytest

from equipoise.parallel.communication.rank import Rank, find_rank, mpi_size
from tests.support.trainer_runs import refuses

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TASK = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
FIRST = TASK | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
BATCH_SCRIPT = FIRST | {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train.sh"}
STEP = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        (TORCHRUN, Rank(3, 1, 1, 4, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Rank(1, 1, 0, 2, None)),
        (TORCHRUN | TASK, Rank(3, 1, 1, 4, 2)),  # torchrun, started by srun
        (TASK, Rank(5, 1, 1, 8, None)),
        (TASK | STEP | {"SLURM_NTASKS_PER_NODE": "4"}, Rank(5, 1, 1, 8, 4)),
        (TASK | STEP | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, Rank(5, 1, 1, 8, 4)),
        (TASK | STEP | {"SLURM_STEP_TASKS_PER_NODE": "5,3"}, Rank(5, 1, 1, 8, 3)),
        # A step of its own size in a larger job.
        (TASK | STEP | {"SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "8"}, Rank(5, 1, 1, 8, None)),
        # One process, whatever else is set: a step of one task.
        (FIRST | STEP | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"WORLD_SIZE": "1"}, None),
        (TASK | STEP | {"WORLD_SIZE": "8"}, Rank(5, 1, 1, 8, None)),  # Slurm says the rank
    ],
)
def test_the_rank_is_read_from_the_environment(environment: dict[str, str], place: Rank | None) -> None:
    assert find_rank(environment) == place


@pytest.mark.parametrize(
    "environment",
    [
        BATCH_SCRIPT,
        BATCH_SCRIPT | {"SLURM_STEP_ID": str(0xFFFFFFFB)},
        FIRST | STEP | {"SLURM_JOB_NAME": "interactive"},
        FIRST | STEP | {"SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_JOB_NAME": "notebook"},
    ],
)
def test_slurms_variables_without_srun_are_of_one_process(environment: dict[str, str]) -> None:
    """A batch script or a shell, whose trainer starts the other processes."""
    assert find_rank(environment) is None


@pytest.mark.parametrize(
    ("environment", "here", "machines"),
    [
        (TORCHRUN, 2, 2),
        ({"RANK": "1", "WORLD_SIZE": "2"}, 2, 1),  # nothing says otherwise
        (TORCHRUN | {"WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "3"}, 3, 2),
        (TASK | STEP | {"SLURM_NNODES": "2"}, 4, 2),
        (TASK | STEP | {"SLURM_NNODES": "4", "SLURM_STEP_NUM_NODES": "2"}, 4, 2),
    ],
)
def test_num_nodes_is_read_from_torchrun_and_slurm(environment: dict[str, str], here: int, machines: int) -> None:
    place = find_rank(environment)
    assert place is not None
    assert place.count_here() == here
    assert place.count_machines(here) == machines


def test_num_nodes_that_the_user_gives() -> None:
    place = find_rank({"RANK": "1", "WORLD_SIZE": "4"})
    assert place is not None
    assert place.count_here(2) == 2


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "1"}, ["says RANK=1, but not WORLD_SIZE", "torchrun"]),
        ({"WORLD_SIZE": "2"}, ["says WORLD_SIZE=2, but not RANK", "torchrun", "unset"]),
        ({"RANK": "one", "WORLD_SIZE": "2"}, ["RANK='one', which is no number"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK=2, but WORLD_SIZE=2: ranks count from 0"]),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, ["SLURM_PROCID=1, SLURM_NTASKS=2, but not SLURM_LOCALID"]),
        (TASK | STEP | {"SLURM_JOB_NAME": "interactive"}, ["counts as a shell", "task 5 of 8", "--job-name"]),
    ],
)
def test_world_size_without_a_rank_and_other_contradictions_are_refused(
    environment: dict[str, str], words: list[str]
) -> None:
    refuses(lambda: find_rank(environment), *words)


@pytest.mark.parametrize(
    ("environment", "size"),
    [
        ({}, 1),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 4),
        ({"PMI_SIZE": "3"}, 3),
        (BATCH_SCRIPT | {"PMI_SIZE": "3"}, 3),  # mpirun in a batch script
        (FIRST | STEP | {"SLURM_JOB_NAME": "bash", "PMI_SIZE": "8"}, 1),  # Slurm's own, in a shell
    ],
)
def test_processes_of_mpirun(environment: dict[str, str], size: int) -> None:
    assert mpi_size(environment) == size
