"""Devices of a plan: those of this machine, or described ones such as `2x24GiB`, `[40GiB,12GiB]` or `A100-80GB`."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from equipoise.errors import ConfigurationError
from equipoise.formats import format_bytes
from equipoise.memory.devices import DeviceInfo, list_devices

__all__ = ["GPU_MEMORY", "PlannedDevice", "describe_devices"]

_MEBI = 2**20
_GIBI = 2**30

# Memory of common GPUs in GiB, from the data sheets on their makers' product pages (nvidia.com, amd.com).
GPU_MEMORY = {
    "GTX1080Ti": 11,
    "RTX2080Ti": 11,
    "RTX3060": 12,
    "RTX3080": 10,
    "RTX3090": 24,
    "RTX4060Ti-16GB": 16,
    "RTX4070": 12,
    "RTX4080": 16,
    "RTX4090": 24,
    "RTX5080": 16,
    "RTX5090": 32,
    "RTXA5000": 24,
    "RTXA6000": 48,
    "RTX6000Ada": 48,
    "T4": 16,
    "P100": 16,
    "V100-16GB": 16,
    "V100-32GB": 32,
    "A10": 24,
    "L4": 24,
    "A40": 48,
    "L40S": 48,
    "A100-40GB": 40,
    "A100-80GB": 80,
    "H100": 80,
    "H200": 141,
    "B200": 180,
    "MI250X": 128,
    "MI300X": 192,
}

# What tensors cannot have on a CUDA device: the context of the process and the workspaces of cuBLAS, and then the gaps
# between blocks of the allocator. Readings on some GPUs, not a law; see docs/planning.md.
_CONTEXT = 500 * _MEBI
_WORKSPACE = 32 * _MEBI
_GAPS = 0.05
# Bytes to which CUDA's allocator rounds each block.
_CUDA_ROUNDING = 512

_COUNTED = re.compile(r"(?:(\d+)\s*[x*]\s*)?(.+)", re.IGNORECASE)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([MGT])i?B?", re.IGNORECASE)
_UNITS = {"M": _MEBI, "G": _GIBI, "T": 2**40}
_MOST_DEVICES = 1024


@dataclass(frozen=True, kw_only=True)
class PlannedDevice:
    """Device of a plan.

    Attributes:
        name: Its name in tables, such as "cuda:0" or "24 GiB".
        kind: "cuda" or "cpu".
        memory: Its memory in bytes.
        occupied: Bytes that other processes hold, for a device of this machine. Default: 0.
    """

    name: str
    kind: Literal["cuda", "cpu"]
    memory: int
    occupied: int = 0

    @property
    def usable(self) -> int:
        """Bytes that tensors of one process can have."""
        free = self.memory - self.occupied
        if self.kind == "cpu":
            return free
        return max(0, round((free - _CONTEXT - _WORKSPACE) * (1 - _GAPS)))

    @property
    def rounding(self) -> int:
        """Bytes to which the allocator rounds a block."""
        if self.kind == "cuda":
            return _CUDA_ROUNDING
        return 1


def describe_devices(devices: str | int | Sequence[str] = "auto") -> list[PlannedDevice]:
    """Return the devices that a description means.

    Args:
        devices: "auto" for the GPUs of this machine, or else its CPU; a number of these; or descriptions, in a text or
            a list: sizes (`24GiB`), names of GPUs (`A100-80GB`), names of devices here (`cuda:1`, `cpu`), each with a
            number before it (`2x24GiB`) if need be. Default: "auto".

    Raises:
        ConfigurationError: If there is no such device, or a description has another form.

    Example:
        >>> [device.name for device in describe_devices("[2xA100-40GB, 12GiB]")]
        ['A100-40GB', 'A100-40GB', '12 GiB']
    """
    # 1. Devices of this machine.
    if devices in ("auto", -1, "-1"):
        return _of_this_machine()
    if isinstance(devices, int):
        return _first_of_this_machine(devices)
    if isinstance(devices, str):
        if devices.strip().isdigit():
            return _first_of_this_machine(int(devices))
        devices = devices.strip().removeprefix("[").removesuffix("]").split(",")

    # 2. Descriptions.
    result = []
    for text in devices:
        result.extend(_described(str(text).strip().strip("'\"")))
    return result


def _of_this_machine() -> list[PlannedDevice]:
    present = list_devices()
    gpus = [info for info in present if info.device.startswith("cuda")]
    return [_real(info) for info in gpus or present[:1]]


def _first_of_this_machine(count: int) -> list[PlannedDevice]:
    """Return a number of devices; the CPU counts as many times as needed, and is shared out."""
    present = _of_this_machine()
    if count < 1:
        raise ConfigurationError(f"A plan needs at least one device, not devices={count}.")
    if present[0].kind == "cpu":
        return [_shared(present[0], count)] * count
    if count > len(present):
        raise ConfigurationError(
            f"devices={count} asks for more GPUs than the {len(present)} of this machine. Describe others by their"
            f" memory, as in devices={count}x24GiB."
        )
    return present[:count]


def _shared(device: PlannedDevice, count: int) -> PlannedDevice:
    """Return a part of a device that several workers share."""
    return replace(device, memory=device.memory // count, occupied=device.occupied // count)


def _real(info: DeviceInfo) -> PlannedDevice:
    occupied = 0
    if info.memory_free is not None:
        occupied = max(0, info.memory_total - info.memory_free)
    kind: Literal["cuda", "cpu"] = "cpu"
    if info.device.startswith("cuda"):
        kind = "cuda"
    return PlannedDevice(name=info.device, kind=kind, memory=info.memory_total, occupied=occupied)


def _described(text: str) -> list[PlannedDevice]:
    """Return the devices of one description."""
    match = _COUNTED.fullmatch(text)
    if match is None:
        raise _unknown(text)
    count = int(match[1] or 1)
    if not 1 <= count <= _MOST_DEVICES:
        raise ConfigurationError(
            f"devices={text} describes no device; there may be 1 to {_MOST_DEVICES}, as in 2x24GiB."
        )
    description = match[2].strip()

    # 1. A size.
    size = _SIZE.fullmatch(description)
    if size is not None:
        memory = round(float(size[1]) * _UNITS[size[2].upper()])
        if not memory:
            raise ConfigurationError(f"devices={text} describes a device without memory. Give its size, as in 24GiB.")
        name = format_bytes(memory).replace(".0 ", " ")
        return [PlannedDevice(name=name, kind="cuda", memory=memory)] * count

    # 2. The name of a GPU, in any spelling.
    for name, gibibytes in GPU_MEMORY.items():
        if _plain(name) == _plain(description):
            return [PlannedDevice(name=name, kind="cuda", memory=gibibytes * _GIBI)] * count

    # 3. A device of this machine.
    for info in list_devices(only=[description]):
        return [_shared(_real(info), count)] * count
    raise _unknown(description)


def _plain(name: str) -> str:
    """Return a name without case, blanks and signs, and without its maker."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia").removeprefix("geforce")


def _unknown(description: str) -> ConfigurationError:
    matches = difflib.get_close_matches(description, GPU_MEMORY, 1, 0.5)
    hint = ""
    if matches:
        hint = f" Did you mean {matches[0]}?"
    return ConfigurationError(
        f"There is no device {description!r}: a plan takes sizes such as 24GiB, devices of this machine such as cuda:0,"
        f" and names such as A100-80GB.{hint}"
    )
