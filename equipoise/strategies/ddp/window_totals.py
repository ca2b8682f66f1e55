"""Total weight of an accumulation window over all processes: three ways to exchange it.

AlongGradients   in the first bucket of gradients, since on the CPU a small exchange costs as much as a large one
Apart            in an exchange of its own, where the buckets cannot take it along
OnHost           through the hosts, where gradients are on a GPU: nobody waits for the device to learn that all weights
                 are equal, and then the device has nothing to do
"""

import math
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from equipoise.parallel.batches.weighting import Weight
from equipoise.parallel.communication.process_group import host_group

__all__ = ["AlongGradients", "Apart", "OnHost", "TotalWeight", "as_number", "reading_waits"]


class TotalWeight(Protocol):
    """An exchange of Σw, once per window."""

    def send(self, own: Weight) -> None:
        """Send this process's weight; every process does so at the same place in its step."""

    def total(self) -> float | Tensor:
        """Return Σw; a tensor where reading it would wait for a device."""


def reading_waits(device: torch.device) -> bool:
    """Return whether the host waits for a device when it reads a value from there."""
    return device.type != "cpu"


def as_number(total: Tensor) -> float | Tensor:
    """Return a total as a number, unless reading it would wait for a device."""
    return total if reading_waits(total.device) else total.item()


class _Exchange:
    """One exchange at a time, which runs while this process goes on."""

    _work: "dist.Work | None" = None

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


class Apart(_Exchange):
    """Σw in an exchange of its own, while the backward runs.

    Args:
        device: Where this process computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._total = torch.zeros(())

    def send(self, own: Weight) -> None:
        """See `TotalWeight`."""
        self._wait()  # if a closure is called again
        self._total = torch.as_tensor(own, dtype=torch.float64).to(self.device, copy=True)
        self._work = dist.all_reduce(self._total, async_op=True)

    def total(self) -> float | Tensor:
        """See `TotalWeight`."""
        self._wait()
        return as_number(self._total)


class AlongGradients:
    """Σw as the gradient of a parameter that nobody computes with.

    The wrapper divides by the number of processes, which is undone. Numbers of samples come out as they are.

    Args:
        weight: That parameter, of float32 or wider.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        self._weight = weight
        self._processes = dist.get_world_size()
        self._near = 4 * torch.finfo(weight.dtype).eps
        self._sent: tuple[Weight, Tensor] = (0, torch.zeros_like(weight))  # a weight, and what is sent for it

    def send(self, own: Weight) -> None:
        """See `TotalWeight`: the first gradient to be ready."""
        seen, value = self._sent
        if isinstance(own, Tensor) or isinstance(seen, Tensor) or own != seen:
            value = torch.as_tensor(own * self._processes).to(self._weight)
            self._sent = (own, value)
        self._weight.grad = None
        torch.autograd.backward(self._weight, value)

    def total(self) -> float:
        """See `TotalWeight`."""
        assert self._weight.grad is not None
        total: float = self._weight.grad.item()
        whole_number = math.floor(total + 0.5) if math.isfinite(total) else total
        return whole_number if abs(total - whole_number) <= self._near * total else total


class OnHost(_Exchange):
    """Σw through the hosts of all processes, by a process group beside that of the gradients.

    A weight that is a tensor of the device is not read. Where any process has one, Σw is exchanged between the devices
    as well: at the window's end when it happens for the first time, from then on while the backward runs.

    Args:
        device: Where this process computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._devices = Apart(device)
        self._uses_devices = False  # the same in all processes, since all read the same numbers
        self._own: Weight = 0
        self._numbers = torch.zeros(2, dtype=torch.float64)  # Σw of hosts' numbers, and how many weights are tensors

    def send(self, own: Weight) -> None:
        """See `TotalWeight`."""
        self._wait()  # if a closure is called again
        self._own = own
        on_device = isinstance(own, Tensor) and reading_waits(own.device)
        self._numbers[0] = 0.0 if on_device else float(own)
        self._numbers[1] = float(on_device)
        self._work = dist.all_reduce(self._numbers, group=host_group(), async_op=True)
        if self._uses_devices:
            self._devices.send(own)

    def total(self) -> float | Tensor:
        """See `TotalWeight`."""
        self._wait()
        total, weights_on_devices = self._numbers.tolist()
        if not weights_on_devices:
            return float(total)
        if not self._uses_devices:
            self._uses_devices = True
            self._devices.send(self._own)
        return self._devices.total()
