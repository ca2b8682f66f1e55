"""Read the energy that devices have used, where the machine tells it."""

from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

__all__ = ["EnergyMeter", "meters_for"]

_POWERCAP = Path("/sys/class/powercap")


class _NVMLMeter:
    """Energy of an NVIDIA device since the driver was loaded, less that at the start. Any failure raises."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = import_module("pynvml")
        self._nvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        self._handle = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        self._start = 0.0
        self._start = self.joules()

    def joules(self) -> float:
        millijoules = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        return float(millijoules / 1000) - self._start


class _RAPLMeter:
    """Energy of a processor by Intel's running average power limit, which AMD's processors report as well.

    Its counter begins anew at a limit, after minutes at the least, so it is read in each epoch.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._limit = int((folder / "max_energy_range_uj").read_text())
        self._last = self._read()
        self._sum = 0

    def joules(self) -> float:
        now = self._read()
        self._sum += (now - self._last) % (self._limit + 1)
        self._last = now
        return self._sum / 1e6

    def _read(self) -> int:
        return int(self._file.read_text())


# Its method `joules` returns the energy since it was made.
EnergyMeter = _NVMLMeter | _RAPLMeter


def meters_for(devices: Sequence[torch.device], *, with_processors: bool) -> list[EnergyMeter]:
    """Return meters for the CUDA devices of a process, by NVML, and for the processors of its machine, by RAPL.

    A device without a meter is left out. NVML needs the package nvidia-ml-py. Linux lets only root read RAPL unless its
    administrator has decided otherwise.

    Args:
        devices: The devices.
        with_processors: Whether processors are measured: by one process of a machine.
    """
    meters: list[EnergyMeter] = []
    # The package or the driver may be missing, or too old for this counter.
    for device in dict.fromkeys(devices):
        if device.type == "cuda":
            with suppress(Exception):
                meters.append(_NVMLMeter(device))
    # Folders with a second number are parts of a processor.
    if with_processors:
        for folder in sorted(_POWERCAP.glob("intel-rapl:[0-9]")):
            with suppress(OSError, ValueError):
                meters.append(_RAPLMeter(folder))
    return meters
