"""Devices, read here where torch has no GPUs, and else in a process that ends."""

import os
from pathlib import Path

import pytest
import torch

from equipoise.app.machine.facts import device_list
from equipoise.app.machine.facts.device_list import read_devices
from equipoise.memory.devices import DeviceInfo
from equipoise.parallel.workers.bounded_call import CallError

GPU = DeviceInfo(
    device="cuda:0",
    name="A GPU",
    index=0,
    physical=0,
    uuid="GPU-1234",
    memory_total=2**30,
    memory_free=2**20,
    compute_capability=(9, 0),
    cores=132,
)


@pytest.fixture
def built_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")


def test_the_devices_of_a_build_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(device_list, "list_devices", lambda only=None: [GPU])
    devices = read_devices()
    (gpu,) = devices.devices
    assert (gpu.name, gpu.uuid, devices.failure) == ("A GPU", None, None)


def list_a_gpu(only: object = None) -> list[DeviceInfo]:
    return [GPU]


@pytest.mark.thorough
def test_what_the_process_has_read_comes_back(built_for_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_list, "list_devices", list_a_gpu)
    (gpu,) = read_devices().devices
    assert (gpu.name, gpu.compute_capability, gpu.uuid) == ("A GPU", (9, 0), None)


def fail(only: object = None) -> list[DeviceInfo]:
    if only is None:
        raise RuntimeError("CUDA driver is insufficient, see /home/somebody/x")
    return []


def abort(only: object = None) -> list[DeviceInfo]:
    if only is None:
        os.abort()
    return []


@pytest.mark.parametrize(
    ("function", "failure"),
    [
        (fail, "RuntimeError: CUDA driver is insufficient, see ..."),
        (abort, "its process was ended by SIGABRT"),
    ],
    ids=["fails", "aborts"],
)
def test_gpus_that_cannot_be_read(
    built_for_cuda: None, monkeypatch: pytest.MonkeyPatch, function: object, failure: str
) -> None:
    monkeypatch.setattr(device_list, "list_devices", function)
    devices = read_devices()
    assert devices.devices == []
    assert devices.failure is not None
    assert devices.failure.startswith(failure)


def test_the_driver(built_for_cuda: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise CallError("no process")

    monkeypatch.setattr(device_list, "call_bounded", refuse)
    version = tmp_path / "version"
    monkeypatch.setattr(device_list, "_DRIVERS", (tmp_path / "none", version))
    assert read_devices().driver is None
    version.write_text("570.86.15\n")
    assert (read_devices().driver, read_devices().failure) == ("570.86.15", "no process")
