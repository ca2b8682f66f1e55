"""The module on each device of a process; one of them computes a part."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torchmetrics import Metric

from equipoise.extensions.virtual.parts.part_shares import PartTimes
from equipoise.parallel.device_work import computing_on, on_device
from equipoise.parallel.replicas.replicas import Replicas

__all__ = ["PartModules"]


class PartModules:
    """A module and its replicas on further devices of this process.

    Args:
        module: The user's module, on the first device.
        devices: The devices of this process.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self._times: PartTimes | None = None
        self._module = module
        # Gradients of a part arrive at the parameters of the module, whichever device has computed it.
        self._replicas = Replicas(module, devices, always_connected=True)

    def measure(self) -> None:
        """Measure the parts of the next steps."""
        self._times = PartTimes(self.devices)

    def measured_shares(self, count: int) -> list[int] | None:
        """Return the number of parts of each device at the end of a measurement, else None.

        Args:
            count: The number of parts of the step that ends.
        """
        if self._times is None:
            return None
        shares = self._times.end_step(count)
        if shares is not None:
            self._times = None
        return shares

    def begin_step(self) -> None:
        """Note that tensors may have changed since the last step, as through `.data`."""
        self._replicas.distrust()

    @contextmanager
    def computing(self, place: int) -> Iterator[nn.Module]:
        """Let a device compute a part, and its backward, in a `with` block.

        Yields:
            The module on that device, with the parameters and buffers that the user's module has now.
        """
        measuring: AbstractContextManager[None] = nullcontext()
        if self._times is not None:
            measuring = self._times.measured(place)
        with measuring:
            if not place:
                yield self._module
                return
            places = (place,)
            with on_device(self.devices[place]), computing_on(place):
                self._replicas.refresh(places)
                with self._replicas.connected(places):
                    yield self._replicas[place]

    def metrics_of(self, place: int, metrics: Sequence[Metric]) -> list[Metric]:
        """Return the copies of metrics that the module on a device has.

        Args:
            place: Index of the device.
            metrics: Metrics of the user's module.
        """
        return self._replicas.metrics_of(place, metrics)

    def module_of(self, place: int) -> nn.Module:
        """Return the module on a device that has computed."""
        return self._replicas[place]

    def original(self, metric: Metric) -> Metric:
        """Return the metric of the user's module of which this one may be a copy."""
        return self._replicas.original(metric)
