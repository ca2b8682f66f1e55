"""Devices of the machine and readings of their memory, CPU and CUDA alike.

On CUDA, readings come from torch's caching allocator, on a CPU from the system's data about this process. No function
here waits for a device.
"""

import os
import platform
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from weakref import WeakSet

import psutil
import torch

from equipoise.errors import ConfigurationError
from equipoise.memory.resident_set import ResidentSet

__all__ = [
    "DeviceInfo",
    "MemoryReading",
    "PeakMeter",
    "PeakWatch",
    "free_memory",
    "list_devices",
    "peak_of_process",
    "read_memory",
    "reset_peak",
]

# The resident set is the CPU's reading.
_resident = ResidentSet()
# By device, the peak before a watch reset it, which `read_memory` still includes: a watch is hidden from others.
_peaks_before_watches: dict[str, int] = {}
# By device, the largest peak before any reset, which `peak_of_process` still includes.
_peaks_of_process: dict[str, int] = {}
# Watches that are in use, started by threads of several devices. A reset lets them note the peak that it forgets.
_watches: "WeakSet[PeakWatch]" = WeakSet()
_watches_lock = Lock()


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """Device that this process can use.

    Attributes:
        device: Its name in torch, such as "cpu" or "cuda:0".
        name: Its product name.
        index: Its index in this process; None for a kind with a single device.
        physical: Its entry in CUDA_VISIBLE_DEVICES, an index or a UUID; equal to `index` if that variable is not set,
            None for other kinds.
        uuid: Its UUID as `nvidia-smi -L` lists it; None for other kinds.
        memory_total: Its memory, in bytes.
        memory_free: Memory that any process can still allocate, in bytes; None if the device does not report it.
        compute_capability: Major and minor number; None for other kinds than CUDA.
        cores: CPU cores that this process may use, or streaming multiprocessors; None if unknown.
    """

    device: str
    name: str
    index: int | None = None
    physical: int | str | None = None
    uuid: str | None = None
    memory_total: int
    memory_free: int | None
    compute_capability: tuple[int, int] | None = None
    cores: int | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryReading:
    """Memory that one process holds on one device, in bytes.

    Attributes:
        device: Name of the device in torch.
        allocated: Bytes in live tensors; on a CPU, the resident set of the process.
        reserved: Bytes that torch's allocator holds, live or cached; None on a CPU.
        peak: The largest `allocated` since the start or the last `reset_peak`; None if the device keeps none (MPS).
    """

    device: str
    allocated: int
    reserved: int | None
    peak: int | None


# Devices


def list_devices(only: Collection[str] | None = None) -> list[DeviceInfo]:
    """List the CPU, then the visible CUDA devices in order, then MPS.

    Reading the free memory of a CUDA device opens a context on it, which takes a few hundred MiB there.

    Args:
        only: Names of the devices to list, such as "cuda:1"; no other is accessed. Default: all.

    Example:
        >>> list_devices()[0].device
        'cpu'
    """
    devices = []
    if only is None or "cpu" in only:
        devices.append(_cpu())
    # Asking whether there are any may take long: it starts the driver.
    includes_cuda = only is None or any(name.startswith("cuda") for name in only)
    if includes_cuda and torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if only is None or f"cuda:{index}" in only:
                devices.append(_cuda(index))
    # The only device of this kind has the names "mps" and "mps:0".
    includes_mps = only is None or any(name.startswith("mps") for name in only)
    if includes_mps and torch.backends.mps.is_available():
        devices.append(_mps())
    return devices


def _cpu() -> DeviceInfo:
    memory = psutil.virtual_memory()
    # The affinity counts the cores of this process; not all systems report it.
    if hasattr(os, "sched_getaffinity"):
        cores: int | None = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count()
    return DeviceInfo(
        device="cpu",
        name=_cpu_name(),
        memory_total=memory.total,
        memory_free=memory.available,
        cores=cores,
    )


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            if name:
                return name
    return platform.processor() or platform.machine() or "CPU"


def _cuda(index: int) -> DeviceInfo:
    properties = torch.cuda.get_device_properties(index)
    try:
        free = torch.cuda.mem_get_info(index)[0]
    except RuntimeError:
        # There is no room for a context, or another process uses the device exclusively.
        free = None
    return DeviceInfo(
        device=f"cuda:{index}",
        name=properties.name,
        index=index,
        physical=_physical(index),
        uuid=f"GPU-{properties.uuid}",
        memory_total=properties.total_memory,
        memory_free=free,
        compute_capability=(properties.major, properties.minor),
        cores=properties.multi_processor_count,
    )


def _physical(index: int) -> int | str:
    """Return the entry of a device in CUDA_VISIBLE_DEVICES, whose entries CUDA numbers in order."""
    entries = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    # A variable that was set after CUDA had started may have any text.
    if index >= len(entries):
        return index
    entry = entries[index].strip()
    if entry.isdecimal():
        return int(entry)
    return entry or index


def _mps() -> DeviceInfo:
    total = torch.mps.recommended_max_memory()
    free = max(0, total - torch.mps.driver_allocated_memory())
    return DeviceInfo(device="mps", name=f"{platform.machine()} GPU", memory_total=total, memory_free=free)


# Readings


def read_memory(device: str | torch.device) -> MemoryReading:
    """Read the memory that this process holds on a device.

    Args:
        device: The device, such as "cpu" or "cuda:0". A reading does not initialise CUDA; before that it is zero.

    Raises:
        ConfigurationError: If there are no readings for this kind of device.

    Example:
        >>> reading = read_memory("cpu")
        >>> reading.reserved is None and reading.peak >= reading.allocated > 0
        True
    """
    reading = _read(_readable(device))
    peak_before_watch = _peaks_before_watches.get(reading.device, 0)
    if reading.peak is None or reading.peak >= peak_before_watch:
        return reading
    return replace(reading, peak=peak_before_watch)


def _read(device: torch.device) -> MemoryReading:
    """Read the memory of a device, and its peak since torch or the system last forgot one."""
    if device.type == "cpu":
        resident, peak = _resident.read()
        return MemoryReading(device="cpu", allocated=resident, reserved=None, peak=peak)
    if device.type == "mps":
        return MemoryReading(
            device="mps",
            allocated=torch.mps.current_allocated_memory(),
            reserved=torch.mps.driver_allocated_memory(),
            peak=None,
        )
    allocated = 0
    reserved = 0
    peak = 0
    # One call for all values: memory_allocated() and similar functions flatten all statistics each time.
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    if stats:
        allocated = stats["allocated_bytes"]["all"]["current"]
        reserved = stats["reserved_bytes"]["all"]["current"]
        peak = stats["allocated_bytes"]["all"]["peak"]
    return MemoryReading(device=str(device), allocated=allocated, reserved=reserved, peak=peak)


def free_memory(device: str | torch.device) -> int | None:
    """Return the memory of a device that this process can still allocate, in bytes; None if unknown.

    Args:
        device: The device, such as "cpu" or "cuda:0". CUDA is read only if it is in use. The cache of torch's allocator
            counts as free.

    Example:
        >>> free_memory("cpu") > 0
        True
    """
    device = torch.device(device)
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    if device.type != "cuda" or not _cuda_in_use():
        return None
    reading = read_memory(device)
    cached = (reading.reserved or 0) - reading.allocated
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def _readable(device: str | torch.device) -> torch.device:
    """Return a device with its index; refuse kinds without readings."""
    device = torch.device(device)
    if device.type not in ("cpu", "cuda", "mps"):
        raise ConfigurationError(
            f"Memory is read from 'cpu', 'cuda' and 'mps' devices, but {str(device)!r} was given."
            " Leave this device out."
        )
    if str(device) != "cuda":
        return device
    index = 0
    # Reading the present device would initialise CUDA.
    if _cuda_in_use():
        index = torch.cuda.current_device()
    return torch.device("cuda", index)


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


# Peaks


def peak_of_process(device: str | torch.device) -> int | None:
    """Return the largest amount that was ever allocated on a device, in bytes, in spite of resets.

    Args:
        device: As for `read_memory`.

    Raises:
        ConfigurationError: If there are no readings for this kind of device.
    """
    device = _readable(device)
    peak = read_memory(device).peak
    if peak is None:
        return None
    return max(peak, _peaks_of_process.get(str(device), 0))


def reset_peak(device: str | torch.device) -> None:
    """Reset the peak of a device to the present allocation; `peak_of_process` still includes the old peak.

    Args:
        device: As for `read_memory`. Some systems keep one peak of the CPU for the life of the process. There, the peak
            after a reset is the largest resident set that was read, until the process exceeds its old peak.

    Raises:
        ConfigurationError: If there are no readings for this kind of device.
    """
    device = _readable(device)
    _peaks_of_process[str(device)] = peak_of_process(device) or 0
    with _watches_lock:
        watches = [watch for watch in _watches if watch.device == device]
    for watch in watches:
        watch.note_peak()
    _peaks_before_watches.pop(str(device), None)
    if device.type == "cpu":
        _resident.reset()
    elif device.type == "cuda" and _cuda_in_use():
        torch.cuda.reset_peak_memory_stats(device)


class PeakMeter:
    """Context manager that measures the additional memory at the peak of its body.

    It changes no reading of others. Meters can be nested. `torch.cuda.max_memory_allocated` sees their starts.

    Args:
        device: As for `read_memory`.

    Attributes:
        extra: Additional bytes, after the body. On a CPU, this is the growth of the resident set: zero if the process
            had memory to spare. On a device that keeps no peak (MPS), the allocation at the end counts as the peak.

    Raises:
        ConfigurationError: If there are no readings for this kind of device.

    Example:
        >>> with PeakMeter("cpu") as meter:
        ...     _ = torch.ones(1000).sum()
        >>> meter.extra >= 0
        True
    """

    def __init__(self, device: str | torch.device) -> None:
        self.device = _readable(device)
        self.extra = 0

    def __enter__(self) -> "PeakMeter":
        self._before = _read(self.device).allocated
        self._watch = PeakWatch(self.device)
        return self

    def __exit__(self, *exc: object) -> None:
        self.extra = max(0, self._watch.peak() - self._before)


class PeakWatch:
    """Peak of a device since the watch was started, whoever resets the peak of the device meanwhile.

    A watch changes no reading of others; `torch.cuda.max_memory_allocated` sees its starts.

    Args:
        device: As for `read_memory`.

    Raises:
        ConfigurationError: If there are no readings for this kind of device.

    Example:
        >>> watch = PeakWatch("cpu")
        >>> reset_peak("cpu")
        >>> watch.peak() > 0
        True
    """

    def __init__(self, device: str | torch.device) -> None:
        self.device = _readable(device)
        self._noted_peak = 0
        with _watches_lock:
            _watches.add(self)
        self.start()

    def start(self) -> None:
        """Start again: forget what was allocated until now."""
        peak_for_others = read_memory(self.device).peak
        reset_peak(self.device)
        if peak_for_others is not None:
            _peaks_before_watches[str(self.device)] = peak_for_others
        self._noted_peak = 0

    def note_peak(self) -> None:
        """Take the present peak of the device into account; called before it is reset."""
        self._noted_peak = self.peak()

    def peak(self) -> int:
        """Return the largest amount allocated since the start, in bytes; the present one where no peak is kept."""
        reading = _read(self.device)
        peak = reading.peak
        if peak is None:
            peak = reading.allocated
        return max(peak, self._noted_peak)
