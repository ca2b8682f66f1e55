"""Devices, read in a process that ends: no context stays on a GPU, and a driver that hangs delays nobody for long."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from equipoise.app.machine.facts.privacy import without_paths
from equipoise.memory.devices import DeviceInfo, list_devices
from equipoise.parallel.workers.availability import can_start_workers
from equipoise.parallel.workers.bounded_call import call_bounded

__all__ = ["Devices", "read_devices", "write_devices"]

# Seconds for the process, which imports torch.
_TIMEOUT = 60.0
# Files in which the kernel shows the version of a driver.
_DRIVERS = (Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version"))


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices of this machine.

    Attributes:
        devices: The devices, the CPU first.
        driver: Version of the GPUs' driver; None if it is unknown.
        failure: The reason why GPUs could not be read; None if they could.
    """

    devices: list[DeviceInfo]
    driver: str | None = None
    failure: str | None = None


def read_devices() -> Devices:
    """Read the devices; of GPUs in a process that ends afterwards."""
    # 1. A build of torch without GPUs has nothing that could hang, and some systems start no such process.
    if (torch.version.cuda is None and torch.version.hip is None) or not can_start_workers():
        return Devices(devices=_anonymous(list_devices()), driver=_driver())

    # 2. The process. What it prints may tell why it failed.
    with TemporaryDirectory(prefix="equipoise-doctor-") as folder:
        result = Path(folder, "devices.json")
        output = Path(folder, "output.txt")
        failure = call_bounded(write_devices, result, timeout=_TIMEOUT, output=output)
        if failure is None:
            text = result.read_text(encoding="utf-8")
            devices = [_device(values) for values in json.loads(text)]
            return Devices(devices=devices, driver=_driver())
        failure = _with_last_line(failure, output)
    return Devices(devices=_anonymous(list_devices(only=["cpu"])), driver=_driver(), failure=failure)


def write_devices(file: Path) -> None:
    """Write the devices that this process can use to a file, as JSON; called in a process of its own."""
    devices = [asdict(info) for info in _anonymous(list_devices())]
    file.write_text(json.dumps(devices), encoding="utf-8")


def _anonymous(devices: list[DeviceInfo]) -> list[DeviceInfo]:
    """Return the devices without their UUIDs, which tell one machine from all others."""
    return [replace(info, uuid=None) for info in devices]


def _device(values: dict[str, Any]) -> DeviceInfo:
    """Return a device from JSON, which has lists in place of tuples."""
    capability = values["compute_capability"]
    if capability is not None:
        values["compute_capability"] = tuple(capability)
    return DeviceInfo(**values)


def _with_last_line(failure: str, output: Path) -> str:
    """Return a reason with the last line that the process printed, which is that of an error."""
    if not output.exists():
        return failure
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines:
        return failure
    return f"{failure}: {without_paths(lines[-1])}"


def _driver() -> str | None:
    """Return the version of the GPUs' driver, as the kernel shows it."""
    for file in _DRIVERS:
        if file.is_file():
            return file.read_text(encoding="utf-8").strip()
    return None
