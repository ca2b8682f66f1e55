"""Which devices are meant: counts, indices, names, repeats."""

from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator

from equipoise.parallel.communication.rank import find_rank
from equipoise.trainer.settings import devices as select
from tests.support.trainer_runs import Small, loader, refuses, trainer

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("devices", "count"),
    [
        ("auto", 1),
        (-1, 1),
        ("3", 3),
        ("0,", 1),
        ([0, 0], 2),
        ([CPU, "cpu:0"], 2),
    ],
    ids=str,
)
def test_cpu_devices_by_count_index_and_name(devices: Any, count: int) -> None:
    for accelerator in ("cpu", CPUAccelerator()):
        assert select.select_devices(accelerator, devices) == [CPU] * count


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch finds four CUDA devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.mark.parametrize(
    ("devices", "indices"),
    [
        ("auto", [0, 1, 2, 3]),
        (2, [0, 1]),
        ("3, 1", [3, 1]),
        (["cuda"], [0]),
        (["cuda:1", "cuda:1"], [1, 1]),
        ([torch.device("cuda", 2), "cuda:0"], [2, 0]),
    ],
    ids=str,
)
@pytest.mark.usefixtures("four_gpus")
def test_cuda_devices_by_count_index_and_name(devices: Any, indices: list[int]) -> None:
    expected = [torch.device("cuda", index) for index in indices]
    for accelerator in ("auto", "gpu", "cuda", CUDAAccelerator()):
        assert select.select_devices(accelerator, devices) == expected


@pytest.mark.usefixtures("four_gpus")
def test_the_cpu_may_be_chosen_where_there_are_gpus() -> None:
    assert select.select_devices("cpu", "auto") == [CPU]
    assert select.select_devices("auto", ["cpu"]) == [CPU]


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch finds an MPS device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    # The state of its generators cannot be read here.
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: torch.zeros(1, dtype=torch.uint8))


@pytest.mark.usefixtures("mps")
def test_the_mps_device() -> None:
    for accelerator in ("auto", "gpu", "mps", MPSAccelerator()):
        assert select.select_devices(accelerator, "auto") == [torch.device("mps", 0)]
    assert select.select_devices("auto", ["mps"]) == [torch.device("mps", 0)]
    assert isinstance(trainer(accelerator="mps").accelerator, MPSAccelerator)
    assert select.select_devices("mps", 1) == select.select_devices("gpu", [0]) == [torch.device("mps", 0)]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"devices": 2}, ["devices=2 asks for more devices", "1 MPS device and the CPU"]),
        ({"devices": [1]}, ["no mps device 1", "1 MPS device and the CPU"]),
        ({"devices": ["mps:1"]}, ["mps:1 does not exist", "1 MPS device and the CPU"]),
        ({"devices": ["mps", "mps"], "strategy": "dp"}, ["one MPS device", "devices=1", "['cpu', 'cpu']"]),
        ({"devices": [0, 0]}, ["one MPS device"]),
        ({"devices": ["mps", "cpu"]}, ["cpu is no mps device"]),
        ({"accelerator": "cuda"}, ["accelerator='cuda'", "'auto'"]),
        ({"precision": "64-true"}, ["MPS devices have no float64", "32-true"]),
        ({"strategy": "hogwild"}, ["mps:0", "accelerator='cpu'"]),
        ({"capture": True}, ["mps:0", "accelerator='cuda'"]),
    ],
    ids=str,
)
@pytest.mark.usefixtures("mps")
def test_what_the_mps_device_cannot_do_is_refused(options: dict[str, Any], parts: list[str]) -> None:
    run = {"accelerator": "auto", **options}
    refuses(lambda: trainer(**run).fit(Small(), loader()), *parts)


@pytest.mark.usefixtures("mps")
def test_processes_do_not_share_the_mps_device() -> None:
    rank = find_rank({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    refuses(lambda: select.select_devices("auto", "auto", rank), "2 processes", "1 MPS device", "accelerator='cpu'")
    assert select.select_devices("cpu", "auto", rank) == [CPU, CPU]


@pytest.mark.usefixtures("four_gpus")
def test_a_trainer_tells_its_devices() -> None:
    run = trainer(accelerator="cuda", devices=[2])
    assert run.device_ids == [2]
    assert run.num_devices == 1
    assert run.strategy.root_device == torch.device("cuda", 2)
    assert isinstance(run.accelerator, CUDAAccelerator)
