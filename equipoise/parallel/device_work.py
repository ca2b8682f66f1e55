"""Announcements of what is computed and kept on which device of this process, for one observer.

A measurement on `["cpu", "cpu"]` cannot tell by a tensor which of the two devices it belongs to. So everything that
computes on several devices announces it here. Without an observer an announcement does nothing.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

__all__ = ["DeviceObserver", "computing_on", "in_helper_thread", "note_placed", "observe_devices"]


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
