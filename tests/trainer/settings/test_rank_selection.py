"""Meaning of "auto": on several devices, and where others have started this process."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from equipoise import (
    BalancedDataParallelStrategy,
    DataParallelStrategy,
    DDPStrategy,
    PipelineStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from tests.support.trainer_runs import refuses, trainer

CPU = torch.device("cpu")
CARDS = [torch.device("cuda", index) for index in range(4)]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch finds four CUDA devices of one model."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "card")


def started(monkeypatch: pytest.MonkeyPatch, rank: int, size: int, here: int) -> None:
    """Sets the variables of torchrun."""
    variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % here, "LOCAL_WORLD_SIZE": here}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("GROUP_WORLD_SIZE", str(-(-size // here)))


def plain(**options: Any) -> Any:
    """A trainer that chooses its accelerator itself."""
    return trainer(accelerator="auto", **options)


# On one machine


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("interactive", [False, True])
def test_a_plain_trainer_takes_all_gpus_in_a_script_and_in_a_notebook(
    interactive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if interactive:
        monkeypatch.setattr(sys, "ps1", "In: ", raising=False)
    run = plain()
    assert type(run.connected_strategy) is DDPStrategy
    assert (run.world_size, run.num_devices, run.num_nodes) == (4, 4, 1)
    assert plain(devices=2).world_size == 2
    assert type(plain(devices=1).connected_strategy) is SingleDeviceStrategy


@pytest.mark.usefixtures("gpus")
def test_each_strategy_takes_its_own_of_all_gpus() -> None:
    class Own(Strategy):
        """Computes on one device, as the base class does."""

    for strategy in ("single_device", SingleDeviceStrategy(), Own()):
        assert plain(strategy=strategy).connected_strategy.devices == tuple(CARDS[:1])
    for several in ("dp", DataParallelStrategy(), "balanced", PipelineStrategy()):
        assert plain(strategy=several).connected_strategy.devices == tuple(CARDS)
    assert plain(strategy="ddp").world_size == 4


def test_several_gpus_where_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch, gpus: None) -> None:
    monkeypatch.setattr("equipoise.parallel.workers.availability.can_start_workers", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: ["slow", "fast", "fast"][device.index])
    kinds = {1: SingleDeviceStrategy, 2: DataParallelStrategy, 3: BalancedDataParallelStrategy}
    for count, kind in kinds.items():
        assert type(plain(devices=list(range(3 - count, 3))).connected_strategy) is kind


# Among other processes


def test_a_plain_trainer_joins_the_processes_of_torchrun_and_has_their_num_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started(monkeypatch, rank=5, size=8, here=4)
    for options in ({}, {"strategy": "ddp"}, {"devices": 4}, {"num_nodes": 2}, {"devices": 4, "num_nodes": 2}):
        run = trainer(**options)
        assert type(run.connected_strategy) is DDPStrategy
        assert (run.global_rank, run.local_rank, run.node_rank, run.world_size) == (5, 1, 1, 8)
        assert (run.num_nodes, run.num_devices) == (2, 4)


@pytest.mark.usefixtures("gpus")
def test_a_process_takes_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, rank=5, size=6, here=3)
    assert plain().connected_strategy.devices == (CARDS[2],)
    assert plain(devices=[3, 1, 0]).connected_strategy.devices == (CARDS[0],)


def test_a_process_that_sees_one_gpu_takes_it(monkeypatch: pytest.MonkeyPatch, gpus: None) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    started(monkeypatch, rank=1, size=2, here=2)
    assert plain().connected_strategy.devices == (CARDS[0],)


@pytest.mark.usefixtures("gpus")
def test_too_few_gpus_for_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, rank=1, size=5, here=5)
    refuses(plain, "5 processes on this machine", "4 CUDA devices", "Start fewer", "accelerator='cpu'")


@pytest.mark.usefixtures("gpus")
def test_one_process_of_torchrun_has_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, rank=0, size=1, here=1)
    run = plain()
    assert type(run.connected_strategy) is SingleDeviceStrategy
    assert run.connected_strategy.devices == (CARDS[0],)
    assert plain(strategy="dp", devices=2).connected_strategy.devices == tuple(CARDS[:2])


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_copies_of_mpirun_without_ranks_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    assert trainer().world_size == 1
    monkeypatch.setenv(name, "4")
    processes = PipelineStrategy(engine="processes")
    for strategy in ("auto", "single_device", "ddp", DDPStrategy(), "balanced", processes):
        devices = 2 if strategy in ("balanced", processes) else 1
        telling = ("one of 4", "torchrun", "RANK, WORLD_SIZE and LOCAL_RANK", "MASTER_PORT", "independent=True")
        refuses(lambda s=strategy, d=devices: trainer(strategy=s, devices=["cpu"] * d), *telling)
    assert trainer(strategy=SingleDeviceStrategy(independent=True)).world_size == 1
    started(monkeypatch, rank=1, size=4, here=4)
    assert trainer().world_size == 4


def test_machines_with_unequal_numbers_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, rank=3, size=5, here=3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    run = trainer()
    assert (run.world_size, run.num_nodes, run.local_rank) == (5, 2, 0)


@pytest.mark.usefixtures("gpus")
def test_measured_shares_where_a_process_knows_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    monkeypatch.setattr(DDPStrategy, "__init__", lambda self, shares=None: chosen.append(shares))
    monkeypatch.setattr(DDPStrategy, "connect", lambda self, devices, _: setattr(self, "devices", devices))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: ["slow", "fast"][device.index % 2])
    plain()
    started(monkeypatch, rank=0, size=2, here=2)
    plain()
    started(monkeypatch, rank=0, size=4, here=2)
    plain()
    assert chosen == ["auto", "auto", None]


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "single_device", "devices": 1},
        {"strategy": "dp"},
        {"strategy": Strategy()},
    ],
    ids=["single_device", "dp", "an object of one's own"],
)
def test_strategies_of_one_process_are_refused_among_others(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    started(monkeypatch, rank=1, size=2, here=2)
    found = "this is one of 2: the environment says RANK=1 and WORLD_SIZE=2"
    refuses(lambda: trainer(**options), "in one process", found, "strategy='ddp'", "independent=True")


def test_strategies_of_one_process_are_refused_under_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"PROCID": "1", "NTASKS": "2", "LOCALID": "1", "JOB_ID": "7", "STEP_ID": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    refuses(lambda: trainer(strategy="dp"), "Slurm says SLURM_PROCID=1 and SLURM_NTASKS=2")
    assert trainer().world_size == 2


def test_a_pipeline_of_processes_joins_those_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, rank=1, size=2, here=2)
    run = trainer(strategy=PipelineStrategy(engine="processes"))
    assert run.global_rank == 1


@pytest.mark.usefixtures("gpus")
def test_independent_trainings_take_the_device_of_their_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, rank=6, size=8, here=4)
    for devices in ("auto", 4):
        run = plain(strategy=SingleDeviceStrategy(independent=True), devices=devices)
        assert run.connected_strategy.devices == (CARDS[2],)
        assert (run.world_size, run.global_rank) == (1, 0)
    refuses(lambda: SingleDeviceStrategy(independent="yes"), "independent must be True or False, not 'yes'")


def test_counts_that_contradict_the_environment_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, rank=1, size=4, here=2)
    refuses(lambda: trainer(devices=1), "4 processes, but 1 devices on each of 2", "Leave out devices")
    refuses(lambda: trainer(devices=2, num_nodes=1), "4 processes, but 2 devices on each of 1")


@pytest.mark.usefixtures("gpus")
def test_ray_is_asked_for_the_device_of_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's ranks are not in the order of the GPUs, so it is asked for the device of this worker."""
    started(monkeypatch, rank=0, size=2, here=2)
    monkeypatch.setitem(sys.modules, "ray.train.torch", SimpleNamespace(get_devices=lambda: [CARDS[3]]))
    assert plain().connected_strategy.devices == (CARDS[3],)
    assert trainer().connected_strategy.devices == (CPU,)
