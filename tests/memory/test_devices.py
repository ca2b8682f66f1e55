"""Devices and readings: real for the CPU, stand-ins for what a machine lacks, real for CUDA where there is one."""

import mmap
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from equipoise.errors import ConfigurationError
from equipoise.memory import devices
from equipoise.memory.devices import (
    MemoryReading,
    PeakMeter,
    list_devices,
    peak_of_process,
    read_memory,
    reset_peak,
)

GIB = 2**30


# The CPU.


def test_the_cpu_comes_first() -> None:
    cpu = list_devices()[0]
    memory = psutil.virtual_memory()
    assert cpu.device == "cpu"
    assert cpu.name.strip()
    assert cpu.memory_total == memory.total
    assert 0 < cpu.memory_free <= cpu.memory_total
    assert 1 <= cpu.cores <= psutil.cpu_count()
    assert (cpu.index, cpu.physical, cpu.uuid, cpu.compute_capability) == (None,) * 4


def test_the_driver_is_not_asked_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang() -> bool:
        raise AssertionError("the driver was asked")

    monkeypatch.setattr(torch.cuda, "is_available", hang)
    assert [info.device for info in list_devices(["cpu"])] == ["cpu"]
    assert list_devices([]) == []


def without_files(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    """Some systems lack some of Linux's files."""

    def lacking(real: Any, error: type[Exception]) -> Any:
        def use(path: Path, *args: Any, **options: Any) -> Any:
            if str(path) in missing:
                raise error(path)
            return real(path, *args, **options)

        return use

    monkeypatch.setattr(Path, "read_text", lacking(Path.read_text, FileNotFoundError))
    monkeypatch.setattr(Path, "write_text", lacking(Path.write_text, PermissionError))


@pytest.mark.parametrize(
    ("cpuinfo", "processor", "name"),
    [
        ("processor\t: 0\nmodel name\t: Some CPU: 3 GHz\nmodel name\t: Other\n", "p", "Some CPU: 3 GHz"),
        ("processor\t: 0\nBogoMIPS\t: 50.0\n", "aarch64", "aarch64"),
        ("model name\t:\n", "", "x86_64"),
        (None, "arm", "arm"),
    ],
)
def test_the_name_of_the_cpu(monkeypatch: pytest.MonkeyPatch, cpuinfo: str | None, processor: str, name: str) -> None:
    if cpuinfo is None:
        without_files(monkeypatch, "/proc/cpuinfo")
    else:
        monkeypatch.setattr(Path, "read_text", lambda path, **_: cpuinfo)
    monkeypatch.setattr(devices.platform, "processor", lambda: processor)
    monkeypatch.setattr(devices.platform, "machine", lambda: "x86_64")
    assert list_devices()[0].name == name


def mapped(nbytes: int) -> torch.Tensor:
    """A block of its own, every page of it touched. What `malloc` gives may be cut from what it kept of others."""
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).fill_(1)


def test_a_reading_of_the_cpu_follows_what_is_held() -> None:
    reset_peak("cpu")
    before = read_memory("cpu")
    assert before.device == "cpu"
    assert before.reserved is None
    block = mapped(200_000_000)
    held = read_memory(torch.device("cpu"))
    assert held.allocated - before.allocated > 150e6
    assert held.peak >= held.allocated
    del block
    after = read_memory("cpu")
    assert held.allocated - after.allocated > 150e6
    assert after.peak >= held.peak
    reset_peak("cpu")
    assert held.peak - read_memory("cpu").peak > 150e6


@pytest.mark.thorough
def test_a_meter_sees_a_peak_and_leaves_that_of_others() -> None:
    reset_peak("cpu")
    before = read_memory("cpu")
    block = mapped(300_000_000)  # before the work
    del block
    with PeakMeter("cpu") as outer:
        with PeakMeter("cpu") as meter:
            block = mapped(200_000_000)
            del block
        with PeakMeter("cpu") as nothing:
            pass
    assert 150e6 < meter.extra < 250e6
    assert 150e6 < outer.extra < 250e6
    assert nothing.extra < 50e6
    assert read_memory("cpu").peak - before.allocated > 250e6  # that of the first block, whoever measured in between
    reset_peak("cpu")
    assert read_memory("cpu").peak - before.allocated < 150e6


@pytest.mark.thorough
def test_the_peak_of_the_process_outlives_resets() -> None:
    held = mapped(200_000_000)
    del held
    peak = read_memory("cpu").peak
    reset_peak("cpu")
    assert peak is not None
    assert peak_of_process("cpu") >= peak


@pytest.mark.thorough
def test_a_peak_where_the_system_cannot_forget_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak after a reset is the largest reading, until the process outgrows its old peak."""
    reset_peak("cpu")
    mapped(160_000_000)  # from here on the lifetime peak
    without_files(monkeypatch, "/proc/self/clear_refs")
    reset_peak("cpu")
    start = read_memory("cpu")
    assert start.peak - start.allocated < 20e6
    block = mapped(60_000_000)
    held = read_memory("cpu")
    assert held.peak - start.peak > 40e6
    del block
    assert read_memory("cpu").peak == held.peak
    mapped(320_000_000)  # gone at once, and larger than ever
    assert read_memory("cpu").peak - start.peak > 250e6


@pytest.mark.skipif(sys.platform != "linux", reason="compares two sources that Linux has")
def test_the_peak_without_linuxs_status_file(monkeypatch: pytest.MonkeyPatch) -> None:
    reset_peak("cpu")
    before = read_memory("cpu")
    without_files(monkeypatch, "/proc/self/status")
    mapped(80_000_000)  # gone before the reading
    found = read_memory("cpu")
    assert before.allocated + 60e6 < found.peak <= psutil.virtual_memory().total
    assert found.allocated == pytest.approx(before.allocated, abs=50e6)


# CUDA, with stand-ins.


def fake_cuda(monkeypatch: pytest.MonkeyPatch, free: list[int | None]) -> None:
    """Devices named A, B, C, ..., with so much free memory; None for one that refuses."""

    def mem_get_info(index: int) -> tuple[int, int]:
        if free[index] is None:
            raise RuntimeError("CUDA error: out of memory")
        return free[index], 80 * GIB

    def properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(
            name="ABC"[index],
            total_memory=80 * GIB,
            major=9,
            minor=index,
            multi_processor_count=100 + index,
            uuid=f"0000-{index}",
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)


@pytest.mark.parametrize(
    ("visible", "physical"),
    [
        (None, [0, 1, 2]),
        ("MIG-1/2/0, 4 ,GPU-5", ["MIG-1/2/0", 4, "GPU-5"]),
        ("0,1,2,99", [0, 1, 2]),  # CUDA stops at the first that does not exist
        ("5", [5, 1, 2]),  # set after CUDA had counted its devices
        ("", [0, 1, 2]),
    ],
)
def test_visible_and_physical_devices(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, physical: list[int | str]
) -> None:
    fake_cuda(monkeypatch, [1, 2, 3])
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    infos = list_devices()[1:]
    assert [info.device for info in infos] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [info.index for info in infos] == [0, 1, 2]
    assert [info.physical for info in infos] == physical


def test_what_is_told_of_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, [5 * GIB, None])
    a, b = list_devices()[1:]
    assert (a.name, a.memory_total, a.memory_free) == ("A", 80 * GIB, 5 * GIB)
    assert (b.compute_capability, b.cores, b.uuid) == ((9, 1), 101, "GPU-0000-1")
    assert b.memory_free is None  # it lets nobody in; the others are listed all the same


def test_a_reading_does_not_initialise_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("_lazy_init", "current_device", "reset_peak_memory_stats", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("it initialises CUDA"))
    reset_peak("cuda")
    assert read_memory("cuda:3") == MemoryReading(device="cuda:3", allocated=0, reserved=0, peak=0)
    assert read_memory("cuda").device == "cuda:0"


# MPS, with stand-ins, and others.


def test_a_device_of_mps_is_listed_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 100)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 40)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 30)
    info = list_devices()[1]
    assert (info.device, info.memory_total, info.memory_free, info.cores) == ("mps", 100, 60, None)
    assert read_memory("mps") == MemoryReading(device="mps", allocated=30, reserved=40, peak=None)
    reset_peak("mps")
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 140)
    assert list_devices()[1].memory_free == 0


@pytest.mark.parametrize("use", [read_memory, reset_peak])
def test_a_kind_of_device_without_readings(use: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"'cpu', 'cuda' and 'mps' devices, but 'meta' was given"):
        use("meta")
