"""Devices, read in another process: no context stays on a GPU, and a driver that hangs delays the caller little."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from equipoise.app.machine.facts.privacy import without_paths
from equipoise.memory.devices import DeviceInfo, list_devices
from equipoise.parallel.workers.availability import can_start_workers
from equipoise.parallel.workers.bounded_call import CallError, call_bounded

__all__ = ["Devices", "read_devices"]

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

    # 2. The process.
    try:
        devices = call_bounded(list_devices, timeout=_TIMEOUT)
    except CallError as error:
        devices = list_devices(only=["cpu"])
        return Devices(devices=_anonymous(devices), driver=_driver(), failure=_with_last_line(error))
    return Devices(devices=_anonymous(devices), driver=_driver())


def _anonymous(devices: list[DeviceInfo]) -> list[DeviceInfo]:
    """Return the devices without their UUIDs, which tell one machine from all others."""
    return [replace(info, uuid=None) for info in devices]


def _with_last_line(error: CallError) -> str:
    """Return why the process failed, with the last line that it printed where it was ended."""
    reason = without_paths(str(error))
    lines = error.output.splitlines()
    if error.is_raised or not lines:
        return reason
    return f"{reason}: {without_paths(lines[-1])}"


def _driver() -> str | None:
    """Return the version of the GPUs' driver, as the kernel shows it."""
    for file in _DRIVERS:
        if file.is_file():
            return file.read_text(encoding="utf-8").strip()
    return None
