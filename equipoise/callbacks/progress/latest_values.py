"""LatestValues: metrics as plain numbers, read without waiting for a device."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["LatestValues"]

# Numbers, tensors or texts by name.
Values = Mapping[str, Any]


class _Event(Protocol):
    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


def _record_event(device: torch.device) -> _Event:
    stream = torch.cuda.current_stream(device)
    event: _Event = stream.record_event()
    return event


class _PendingCopies(NamedTuple):
    """Names of values that are being copied, and the event after their copies."""

    event: _Event
    names: list[str]


class LatestValues:
    """Metrics as plain numbers, read without waiting for a device.

    A value on CUDA is copied to pinned memory in the order of the device's queue, and returned by the first reading
    after the copy is done. Earlier readings return the value before. A device that keeps up with the host returns
    values that are at most one reading old. Values on the host are read immediately.

    Args:
        record_event: Function that records an event at the end of a device's queue. Default: an event on the device's
            current stream.
        pin_memory: Copy to page-locked memory. Copies to other memory would wait for the device. Default: True.

    Example:
        >>> LatestValues().read({"loss": torch.tensor(0.5), "step": 3})
        {'loss': 0.5, 'step': 3}
    """

    def __init__(
        self,
        *,
        record_event: Callable[[torch.device], _Event] = _record_event,
        pin_memory: bool = True,
    ) -> None:
        self._record_event = record_event
        self._pin_memory = pin_memory
        # Tensors on the host, and the numbers that were read from them, by name.
        self._copies: dict[str, Tensor] = {}
        self._latest: dict[str, float] = {}
        # Copies that may not be done, of each device.
        self._pending: dict[torch.device, _PendingCopies] = {}

    def read(self, values: Values, *, wait: bool = False) -> dict[str, Any]:
        """Return the latest numbers that are available.

        Args:
            values: Tensors of one element, numbers or texts by name.
            wait: Wait for the copies, so that the numbers are those of `values`. Default: False.

        Returns:
            The same names in the same order, without those whose first copy is not done yet.
        """
        # 1. Read finished copies, and start new ones.
        self._finish_copies(wait=wait)
        remote = _values_on_cuda(values)
        self._start_copies(remote)
        if wait:
            self._finish_copies(wait=True)
        # 2. Collect the numbers.
        latest: dict[str, Any] = {}
        for name, value in values.items():
            if name not in remote:
                latest[name] = _number(value)
            # The first copy of a new value may not be done.
            elif name in self._latest:
                latest[name] = self._latest[name]
        return latest

    def _finish_copies(self, *, wait: bool) -> None:
        """Read the copies that are done."""
        # The loop removes items of the dictionary.
        all_pending = list(self._pending.items())
        for device, pending in all_pending:
            event = pending.event
            if wait:
                event.synchronize()
            elif not event.query():
                continue
            del self._pending[device]
            for name in pending.names:
                copy = self._copies[name]
                self._latest[name] = float(copy)

    def _start_copies(self, values: Mapping[str, Tensor]) -> None:
        """Start copies from every device without pending copies."""
        names_by_device = _names_by_device(values)
        for device, names in names_by_device.items():
            # More copies would only fill the queue of a slow device.
            if device in self._pending:
                continue
            for name in names:
                value = values[name]
                detached = value.detach()
                self._copy(name, detached)
            event = self._record_event(device)
            self._pending[device] = _PendingCopies(event, names)

    def _copy(self, name: str, value: Tensor) -> None:
        # Memory of an earlier copy is used again.
        copy = self._copies.get(name)
        if copy is None or copy.dtype != value.dtype:
            copy = torch.empty(
                (),
                dtype=value.dtype,
                pin_memory=self._pin_memory,
            )
            self._copies[name] = copy
        scalar = value.reshape(())
        copy.copy_(scalar, non_blocking=True)


def _values_on_cuda(values: Values) -> dict[str, Tensor]:
    remote = {}
    for name, value in values.items():
        if isinstance(value, Tensor) and value.is_cuda:
            remote[name] = value
    return remote


def _names_by_device(values: Mapping[str, Tensor]) -> dict[torch.device, list[str]]:
    names: dict[torch.device, list[str]] = {}
    for name, value in values.items():
        names_of_device = names.setdefault(value.device, [])
        names_of_device.append(name)
    return names


def _number(value: Any) -> Any:
    """Return a tensor's number; any other value as it is."""
    if isinstance(value, Tensor):
        return float(value)
    return value
