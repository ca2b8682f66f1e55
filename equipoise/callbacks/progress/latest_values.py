"""LatestValues: metrics as plain numbers, read without waiting for a device."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["LatestValues"]

# Numbers, tensors or texts by name.
Values = Mapping[str, Any]


def _record_event(device: torch.device) -> Any:
    return torch.cuda.current_stream(device).record_event()


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
        record_event: Callable[[torch.device], Any] = _record_event,
        pin_memory: bool = True,
    ) -> None:
        self._record_event = record_event
        self._pin_memory = pin_memory
        # Tensors on the host, and the numbers that were read from them, by name.
        self._copies: dict[str, Tensor] = {}
        self._latest: dict[str, float] = {}
        # For each device the event after copies that may not be done, and the names of the copied values.
        self._pending: dict[torch.device, tuple[Any, list[str]]] = {}

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
        remote = {name: value for name, value in values.items() if isinstance(value, Tensor) and value.is_cuda}
        self._start_copies(remote)
        if wait:
            self._finish_copies(wait=True)
        # 2. Collect the numbers.
        latest: dict[str, Any] = {}
        for name, value in values.items():
            # The first copy of a new value may not be done.
            if name in remote:
                if name in self._latest:
                    latest[name] = self._latest[name]
            elif isinstance(value, Tensor):
                latest[name] = float(value)
            else:
                latest[name] = value
        return latest

    def _finish_copies(self, *, wait: bool) -> None:
        """Read the copies that are done."""
        # The loop removes items of the dictionary.
        for device, (event, names) in list(self._pending.items()):
            if wait:
                event.synchronize()
            elif not event.query():
                continue
            del self._pending[device]
            for name in names:
                self._latest[name] = float(self._copies[name])

    def _start_copies(self, values: Mapping[str, Tensor]) -> None:
        """Start copies from every device without pending copies."""
        started: dict[torch.device, list[str]] = defaultdict(list)
        for name, value in values.items():
            # More copies would only fill the queue of a slow device.
            if value.device not in self._pending:
                self._copy(name, value.detach())
                started[value.device].append(name)
        for device, names in started.items():
            self._pending[device] = (self._record_event(device), names)

    def _copy(self, name: str, value: Tensor) -> None:
        # Memory of an earlier copy is used again.
        copy = self._copies.get(name)
        if copy is None or copy.dtype != value.dtype:
            copy = torch.empty((), dtype=value.dtype, pin_memory=self._pin_memory)
            self._copies[name] = copy
        copy.copy_(value.reshape(()), non_blocking=True)
