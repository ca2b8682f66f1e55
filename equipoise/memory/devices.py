"""Devices of the machine and readings of their memory, CPU and CUDA alike.

On CUDA a reading is what torch's caching allocator knows, on a CPU what the system knows of this process. Nothing here
waits for a device.
"""

import os
import platform
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from equipoise.errors import ConfigurationError

__all__ = [
    "DeviceInfo",
    "MemoryReading",
    "PeakMeter",
    "format_bytes",
    "free_memory",
    "list_devices",
    "peak_of_process",
    "read_memory",
    "reset_peak",
    "resident_bytes",
]

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_earlier_peaks: dict[str, int] = {}  # of a device whose peak a meter began anew, for those who read it afterwards
_before_resets: dict[str, int] = {}  # of all that was before a peak was begun anew


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """A device that this process can use.

    Attributes:
        device: The name torch knows it by, such as "cpu" or "cuda:0".
        name: The name its maker gave it.
        index: The index under which this process sees it; None for a kind of which there is one.
        physical: What CUDA calls it when nothing is hidden: its entry in CUDA_VISIBLE_DEVICES, an index or a UUID;
            equal to `index` where that variable is not set, None for other kinds.
        uuid: Its UUID as `nvidia-smi -L` lists it; None for other kinds.
        memory_total: Its memory, in bytes.
        memory_free: What any process could still take of it, in bytes; None where the device does not say.
        compute_capability: Major and minor; None for other kinds than CUDA.
        cores: CPU cores this process may run on, or streaming multiprocessors; None where unknown.
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
    """The memory one process holds on one device, in bytes.

    Attributes:
        device: The name torch knows it by.
        allocated: In live tensors; on a CPU, the resident set of the process.
        reserved: Taken from the device by torch's allocator, live or cached; None on a CPU.
        peak: The largest `allocated` since the start or the last `reset_peak`; None where the device keeps none (MPS).
    """

    device: str
    allocated: int
    reserved: int | None
    peak: int | None


def list_devices(only: Collection[str] | None = None) -> list[DeviceInfo]:
    """Lists the CPU, then the visible CUDA devices in order, then MPS.

    Asking a CUDA device for its free memory opens a context on it, which takes a few hundred MiB there.

    Args:
        only: The names of those that are wanted, such as "cuda:1"; no other is asked for anything. Default: all.

    Example:
        >>> list_devices()[0].device
        'cpu'
    """
    devices = [_cpu()] if only is None or "cpu" in only else []
    if torch.cuda.is_available():
        indices = range(torch.cuda.device_count())
        devices += [_cuda(index) for index in indices if only is None or f"cuda:{index}" in only]
    if torch.backends.mps.is_available() and (only is None or any(name.startswith("mps") for name in only)):
        devices.append(_mps())
    return devices


def read_memory(device: str | torch.device) -> MemoryReading:
    """Reads how much memory this process holds on a device.

    Args:
        device: "cpu", "cuda:0", ... Zeros are read from CUDA before it is initialised, which a reading never does.

    Raises:
        ConfigurationError: If there are no readings for this kind of device.

    Example:
        >>> reading = read_memory("cpu")
        >>> reading.reserved is None and reading.peak >= reading.allocated > 0
        True
    """
    device = _readable(device)
    if device.type == "cpu":
        resident, peak = _resident.read()
        peak = max(peak, _earlier_peaks.get("cpu", 0))
        return MemoryReading(device="cpu", allocated=resident, reserved=None, peak=peak)
    if device.type == "mps":
        return MemoryReading(
            device="mps",
            allocated=torch.mps.current_allocated_memory(),
            reserved=torch.mps.driver_allocated_memory(),
            peak=None,
        )
    stats = torch.cuda.memory_stats_as_nested_dict(device)  # memory_allocated() and its kin flatten all of it each time
    allocated = stats["allocated_bytes"]["all"] if stats else {"current": 0, "peak": 0}
    reserved = stats["reserved_bytes"]["all"]["current"] if stats else 0
    peak = max(allocated["peak"], _earlier_peaks.get(str(device), 0))
    return MemoryReading(device=str(device), allocated=allocated["current"], reserved=reserved, peak=peak)


def peak_of_process(device: str | torch.device) -> int | None:
    """The largest amount that was ever allocated on a device, whatever was reset since, in bytes.

    Args:
        device: As for `read_memory`.

    Raises:
        ConfigurationError: If there are no readings for this kind of device.
    """
    device = _readable(device)
    peak = read_memory(device).peak
    return None if peak is None else max(peak, _before_resets.get(str(device), 0))


def reset_peak(device: str | torch.device) -> None:
    """Begins the peak of a device anew, at what is allocated now; `peak_of_process` still knows the old one.

    Args:
        device: As for `read_memory`. On a CPU whose system keeps one peak for the life of the process, the peak after a
            reset is the largest resident set that was read, until the process outgrows its old peak.

    Raises:
        ConfigurationError: If there are no readings for this kind of device.
    """
    device = _readable(device)
    _before_resets[str(device)] = peak_of_process(device) or 0
    _earlier_peaks.pop(str(device), None)
    if device.type == "cpu":
        _resident.reset()
    elif device.type == "cuda" and _cuda_in_use():
        torch.cuda.reset_peak_memory_stats(device)


class PeakMeter:
    """Measures how much more memory a piece of work held at its peak than was held before.

    It begins the device's peak anew, yet `read_memory` goes on as if it had not: the peak it reads afterwards is the
    larger one of before and after. Meters may stand in one another. `torch.cuda.max_memory_allocated` knows nothing of
    this.

    Args:
        device: As for `read_memory`.

    Attributes:
        extra: The bytes, after the work. On a CPU that is the growth of the resident set: none where the process had
            memory to spare. On a device that keeps no peak (MPS), what is held at the end is taken for it.

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
        self._before = read_memory(self.device)
        reset_peak(self.device)
        return self

    def __exit__(self, *exc: object) -> None:
        now = read_memory(self.device)
        peak = now.allocated if now.peak is None else now.peak
        self.extra = max(0, peak - self._before.allocated)
        _earlier_peaks[str(self.device)] = max(peak, self._before.peak or 0)


def free_memory(device: str | torch.device) -> int | None:
    """What this process could still take of a device's memory, in bytes; None where nobody says.

    Args:
        device: "cpu", "cuda:0", ... CUDA is asked only if it is in use; what torch's allocator keeps in
            reserve counts.

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
    return int(torch.cuda.mem_get_info(device)[0]) + (reading.reserved or 0) - reading.allocated


def format_bytes(count: float) -> str:
    """Writes a number of bytes for people, with binary units.

    Example:
        >>> format_bytes(1536 * 2**20), format_bytes(12)
        ('1.5 GiB', '12 B')
    """
    if abs(count) < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if abs(count) < 1023.95:  # from here on one decimal would round to 1024.0
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} PiB"


def _cpu() -> DeviceInfo:
    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return DeviceInfo(
        device="cpu", name=_cpu_name(), memory_total=memory.total, memory_free=memory.available, cores=cores
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), platform.processor() or platform.machine() or "CPU")


def _cuda(index: int) -> DeviceInfo:
    properties = torch.cuda.get_device_properties(index)
    try:
        free = torch.cuda.mem_get_info(index)[0]
    except RuntimeError:  # no room for a context, or another process has the device to itself
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
    """CUDA numbers the entries of CUDA_VISIBLE_DEVICES in order, up to the first that does not exist."""
    entries = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    entry = entries[index].strip() if index < len(entries) else ""  # set too late for CUDA, it may say anything
    return int(entry) if entry.isdecimal() else entry or index


def _mps() -> DeviceInfo:
    total = torch.mps.recommended_max_memory()
    free = max(0, total - torch.mps.driver_allocated_memory())
    return DeviceInfo(device="mps", name=f"{platform.machine()} GPU", memory_total=total, memory_free=free)


def _readable(device: str | torch.device) -> torch.device:
    device = torch.device(device)
    if device.type not in ("cpu", "cuda", "mps"):
        raise ConfigurationError(
            f"Memory is read from 'cpu', 'cuda' and 'mps' devices, but {str(device)!r} was given."
            " Leave this device out."
        )
    if str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device() if _cuda_in_use() else 0)
    return device


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def resident_bytes() -> int:
    """The resident set of this process, in bytes; the quickest of all readings on a CPU."""
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)  # a tenth of the time that psutil takes
    except OSError:
        return int(psutil.Process().memory_info().rss)
    try:
        return int(os.read(file, 128).split()[1]) * _PAGE
    finally:
        os.close(file)


class _Resident:
    """The resident set of this process, and its peak since the last reset."""

    def __init__(self) -> None:
        self._outgrow = 0  # a lifetime peak up to this says nothing of the time since the reset
        self._seen = 0

    def read(self) -> tuple[int, int]:
        """The resident set and its peak, in bytes."""
        resident = resident_bytes()
        lifetime = _lifetime_peak()
        self._seen = max(self._seen, resident, lifetime if lifetime > self._outgrow else 0)
        return resident, self._seen

    def reset(self) -> None:
        """Begins a new peak; Linux does so itself when asked."""
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            self._outgrow = 0
        except OSError:
            self._outgrow = _lifetime_peak()
        self._seen = resident_bytes()


_resident = _Resident()


def _lifetime_peak() -> int:
    """The system's own record of the largest resident set, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    try:
        # Not getrusage where it can be helped: a process that was executed by a larger one begins with that one's peak.
        for line in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
