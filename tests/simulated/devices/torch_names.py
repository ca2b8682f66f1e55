"""Names of torch that a build for the CPU lacks or refuses, for simulated devices.

Imported by `installation` alone, after the extension.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.simulated.devices.graphs import replace_graphs
from tests.simulated.devices.installation import extension

__all__ = ["replace_names"]

_MEMORY_KINDS = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes", "inactive_split_bytes")
_COUNT_KINDS = ("allocation", "segment", "active", "inactive_split")
_EVENTS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
_SYNC_DEBUG_WARN = 1
_SYNC_DEBUG_ERROR = 2


def replace_names() -> None:
    """Replace all names, for the life of this process."""
    _replace_devices()
    _replace_streams()
    _replace_memory()
    _replace_storages()
    _replace_exchanges()
    replace_graphs()


def _index(device: Any) -> int:
    """Return the index of a device; that of the current one for None or "cuda"."""
    return int(torch.cuda._utils._get_device_index(device, optional=True))


# Devices.


def _replace_devices() -> None:
    module = extension()
    private: dict[str, Any] = {
        "_cuda_getDeviceCount": module.device_count,
        "_cuda_init": _initialise,
        "_cuda_getDevice": module.current_device,
        "_cuda_setDevice": module.exchange_device,
        "_cuda_exchangeDevice": module.exchange_device,
        "_cuda_maybeExchangeDevice": module.exchange_device,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_canDeviceAccessPeer": lambda device, peer: True,
        "_cuda_ipc_collect": lambda: None,
    }
    public: dict[str, Any] = {
        "_cudart": object(),
        # The compiler tells functions apart by their identity.
        "_exchange_device": lambda device: module.exchange_device(device),
        "_maybe_exchange_device": lambda device: module.exchange_device(device),
        "device_count": module.device_count,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_properties": _properties,
        "get_device_name": lambda device=None: _properties(device).name,
        "get_device_capability": lambda device=None: (9, 0),
    }
    _set_all(torch._C, private)
    _set_all(torch.cuda, public)
    # A build without cuDNN warns when it is asked.
    torch.backends.cudnn.is_acceptable = lambda tensor: False
    # Checks of the capabilities of real devices.
    torch.cuda._queued_calls.clear()


def _set_all(owner: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def _initialise() -> None:
    module = extension()
    torch.cuda.default_generators = tuple(module.default_generator(index) for index in range(module.device_count()))


def _properties(device: Any = None) -> SimpleNamespace:
    index = _index(device)
    return SimpleNamespace(
        name=f"Simulated device {index}",
        total_memory=extension().total_bytes(index),
        major=9,
        minor=0,
        multi_processor_count=132,
        warp_size=32,
        L2_cache_size=50 << 20,
        uuid=str(index),
        gcnArchName="",
    )


# Streams, events and waiting.


class Event(torch.Event):
    """An event of a simulated device."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> "Event":
        """Return a new event. The last two arguments have no meaning."""
        return torch.Event.__new__(cls, device="cuda", enable_timing=enable_timing)


class Stream(torch.Stream):
    """A stream of a simulated device."""

    def __new__(cls, device: Any = None, priority: int = 0) -> "Stream":
        """Return a new stream. The priority has no meaning."""
        return torch.Stream.__new__(cls, device=torch.device("cuda", _index(device)))


def _replace_streams() -> None:
    private: dict[str, Any] = {
        "_cuda_synchronize": lambda: extension().synchronize(-1),
        "_cuda_setStream": _set_stream,
        "_cuda_getCurrentRawStream": lambda index: _current_stream(index).stream_id,
        "_cuda_set_sync_debug_mode": _set_sync_debug_mode,
        "_cuda_get_sync_debug_mode": _sync_debug_mode,
    }
    public: dict[str, Any] = {
        "Event": Event,
        "Stream": Stream,
        "current_stream": _current_stream,
        "default_stream": lambda device=None: torch.Stream(
            stream_id=0, device_index=_index(device), device_type=int(torch._C._autograd.DeviceType.CUDA)
        ),
    }
    _set_all(torch._C, private)
    _set_all(torch.cuda, public)


def _set_sync_debug_mode(mode: int) -> None:
    extension().refuse_waiting(mode == _SYNC_DEBUG_ERROR)
    extension().warn_of_waiting(mode == _SYNC_DEBUG_WARN)


def _sync_debug_mode() -> int:
    if extension().is_waiting_refused():
        return _SYNC_DEBUG_ERROR
    return _SYNC_DEBUG_WARN if extension().is_waiting_warned_of() else 0


def _current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    """Enter a stream, and with it its device, as CUDA does."""
    extension().exchange_device(device_index)
    extension().set_stream(stream_id, device_index)


# Memory.


def _replace_memory() -> None:
    private: dict[str, Any] = {
        "_cuda_memoryStats": _memory_stats,
        "_cuda_resetPeakMemoryStats": extension().reset_peak,
        "_cuda_resetAccumulatedMemoryStats": lambda index: None,
        "_cuda_emptyCache": lambda: None,
    }
    _set_all(torch._C, private)
    torch.cuda.mem_get_info = _unused_and_total  # type: ignore[assignment]
    torch.cuda.memory.mem_get_info = _unused_and_total  # type: ignore[assignment]


def _unused_and_total(device: Any = None) -> tuple[int, int]:
    index = _index(device)
    total = extension().total_bytes(index)
    return total - extension().allocated_bytes(index), total


def _memory_stats(index: int) -> dict[str, Any]:
    """Return the nested statistics from which torch.cuda reads; nothing is cached, so all sizes are the same."""
    of_a_pool = {
        "current": extension().allocated_bytes(index),
        "peak": extension().peak_bytes(index),
        "allocated": extension().allocation_count(index),
        "freed": 0,
    }
    of_a_kind = {"all": of_a_pool, "small_pool": of_a_pool, "large_pool": of_a_pool}
    stats: dict[str, Any] = dict.fromkeys((*_MEMORY_KINDS, *_COUNT_KINDS), of_a_kind)
    stats.update(dict.fromkeys(_EVENTS, 0))
    return stats


# Storages, which torch allocates on CUDA devices by a name that the build lacks.


def _replace_storages() -> None:
    clone_on_host = torch.storage._StorageBase.clone
    move_on_host = torch._utils._to

    def clone(storage: Any) -> Any:
        if storage.device.type != "cuda":
            return clone_on_host(storage)
        return _bytes_of(storage).clone().untyped_storage()

    def move(storage: Any, device: Any, non_blocking: bool = False) -> Any:
        destination = torch.device(device)
        if destination.type != "cuda" or storage.device == destination:
            return move_on_host(storage, device, non_blocking)
        return _bytes_of(storage).to(destination).untyped_storage()

    torch.storage._StorageBase.clone = clone  # type: ignore[method-assign]
    torch._utils._to = move
    torch.storage._to = move


def _bytes_of(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# Exchanges between devices.


def _replace_exchanges() -> None:
    torch._C._broadcast_coalesced = _broadcast_coalesced  # type: ignore[attr-defined]
    # Sums are then added tensor by tensor.
    torch.cuda.nccl.is_available = lambda tensors: False


def _broadcast_coalesced(tensors: Sequence[Tensor], devices: Sequence[int], buffer_size: int) -> list[list[Tensor]]:
    """Return the tensors on each device; the first has them already."""
    copies = [list(tensors)]
    for index in devices[1:]:
        device = torch.device("cuda", index)
        copies.append([tensor.to(device, non_blocking=True, copy=True) for tensor in tensors])
    return copies
