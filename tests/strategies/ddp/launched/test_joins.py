"""Processes that somebody else has started: torchrun, on one machine or two, and Slurm."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.strategies.ddp.launched.joining import check, script_in
from tests.strategies.programs import start_script, torchrun, wait_for
from tests.support.ports import unused_port


@pytest.mark.thorough
@pytest.mark.parametrize("said", [{"strategy": "ddp", "devices": 2, "num_nodes": 1}, {}], ids=["said", "auto"])
def test_torchrun_starts_the_processes(tmp_path: Path, said: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--standalone", "--nproc-per-node", "2"]
    assert not torchrun(monkeypatch, script_in(tmp_path), [str(tmp_path), json.dumps(said)], options)
    check(tmp_path)


@pytest.mark.thorough
def test_torchrun_on_two_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls of torchrun that know of one another, on one."""
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    options += ["--master-port", str(unused_port()), "--node-rank"]
    calls = [[*options, node] for node in ("0", "1")]
    assert not torchrun(monkeypatch, script_in(tmp_path), [str(tmp_path), "{}"], *calls)
    check(tmp_path, machines=2)


@pytest.mark.thorough
def test_slurm_starts_the_processes(tmp_path: Path) -> None:
    """Two processes as `srun` starts them; they meet where Slurm's list of machines says."""
    slurm = {"SLURM_NTASKS": "2", "SLURM_NODELIST": "localhost", "SLURM_JOB_ID": "1234"}
    slurm |= {"SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NNODES": "1"}
    slurm |= {"MASTER_PORT": str(unused_port())}
    script, arguments = script_in(tmp_path), [str(tmp_path), "{}"]
    tasks = [{**slurm, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in ("0", "1")]
    wait_for([start_script(script, arguments, **task) for task in tasks])
    check(tmp_path)


@pytest.mark.thorough
def test_a_machine_that_joined_torchrun_later(tmp_path: Path) -> None:
    """Its agent of torchrun has restarted its processes less often than the others."""
    torchrun = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    torchrun |= {"MASTER_PORT": str(unused_port()), "TORCHELASTIC_USE_AGENT_STORE": "False", "LOCAL_RANK": "0"}
    script, arguments = script_in(tmp_path), [str(tmp_path), "{}"]
    nodes = [
        {**torchrun, "RANK": rank, "GROUP_RANK": rank, "TORCHELASTIC_RESTART_COUNT": restarts}
        for rank, restarts in (("0", "3"), ("1", "0"))
    ]
    wait_for([start_script(script, arguments, **node) for node in nodes])
    check(tmp_path, machines=2)
