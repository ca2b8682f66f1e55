"""The current device, and announcements of what is computed and kept on which device, for one observer.

A measurement on `["cpu", "cpu"]` cannot tell by a tensor which of the two devices it belongs to. So everything that
computes on several devices announces it here. Without an observer an announcement does nothing.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "DeviceObserver",
    "computing_on",
    "empty_cache",
    "in_helper_thread",
    "note_placed",
    "observe_devices",
    "on_device",
]


class DeviceObserver(Protocol):
    """Receives the announcements. Devices are numbered in the order of the strategy's devices."""

    def computing_on(self, index: int) -> AbstractContextManager[None]:
        """Return a context in which this device computes."""

    def in_helper_thread(self) -> AbstractContextManager[None]:
        """Return a context of a thread that computes for the thread which waits for it."""

    def note_placed(self, tensor: Tensor, index: int) -> None:
        """Note that a tensor lies on this device from now on."""


_observer: DeviceObserver | None = None


def observe_devices(observer: DeviceObserver | None) -> None:
    """Send the announcements of this process to an observer; None ends that.

    Args:
        observer: The observer, which replaces an earlier one.
    """
    global _observer
    _observer = observer


def computing_on(index: int) -> AbstractContextManager[None]:
    """Return a context in which a device computes.

    Args:
        index: Number of the device among the strategy's devices.

    Example:
        >>> with computing_on(1):
        ...     pass
    """
    if _observer is None:
        return nullcontext()
    return _observer.computing_on(index)


def in_helper_thread() -> AbstractContextManager[None]:
    """Return a context for the work of a thread, while another waits for it."""
    if _observer is None:
        return nullcontext()
    return _observer.in_helper_thread()


def note_placed(tensor: Tensor, index: int) -> None:
    """Announce the device of a parameter or buffer.

    Args:
        tensor: The tensor.
        index: Number of the device among the strategy's devices.
    """
    if _observer is not None:
        _observer.note_placed(tensor, index)


def empty_cache(devices: Iterable[torch.device]) -> None:
    """Return the reserved memory of torch's allocators to the devices, so that other programs can use it.

    Args:
        devices: The devices; nothing is done for a CPU.
    """
    if any(device.type == "cuda" for device in devices):
        torch.cuda.empty_cache()


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make a device the current one of this thread in a `with` block, if its type has a current device.

    Kernels without a guard of their own, and `torch.zeros(3, device="cuda")`, use the current device.

    Args:
        device: The device.

    Example:
        >>> with on_device(torch.device("cpu")):
        ...     pass
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        yield
