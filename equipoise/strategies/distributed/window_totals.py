"""Total weight of an accumulation window over all processes: two ways to exchange it, and the mean by it.

AlongGradients   in the first bucket of gradients, since on the CPU a small exchange costs as much as a large one
Apart            through the hosts, where the buckets cannot include it or gradients are on a GPU: no process waits for
                 the device to read that all weights are equal, and then the device has nothing to compute
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.interop.torch import foreach
from equipoise.parallel.batches.weighting import AccumulationWindow, Weight
from equipoise.parallel.communication.process_group import host_group
from equipoise.parallel.optimizer_parameters import optimizer_parameters

__all__ = ["AlongGradients", "Apart", "as_number", "average_gradients", "reading_waits"]


def reading_waits(device: torch.device) -> bool:
    """Return whether the host waits for a device when it reads a value from there."""
    return device.type != "cpu"


def as_number(total: Tensor) -> float | Tensor:
    """Return a total as a number, unless reading it would wait for a device."""
    if reading_waits(total.device):
        return total
    return total.item()


class Apart:
    """Σw in an exchange of its own, which the hosts have while the backward runs.

    A weight that is a tensor on a device is not read. If any process has one, the devices exchange Σw at the end of the
    window.

    Args:
        device: The device of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._weight: Weight = 0
        # Σw of the weights that hosts can read, and the number of weights that are tensors on a device.
        self._numbers = torch.zeros(2, dtype=torch.float64)
        self._work: dist.Work | None = None

    def send(self, weight: Weight) -> None:
        """Send this process's weight; every process does so at the same point of its step."""
        # An optimiser may call its closure again, before the total was read.
        self._wait()
        self._weight = weight
        on_device = isinstance(weight, Tensor) and reading_waits(weight.device)
        self._numbers[0] = 0.0 if on_device else float(weight)
        self._numbers[1] = float(on_device)
        self._work = dist.all_reduce(self._numbers, group=host_group(), async_op=True)

    def total(self) -> float | Tensor:
        """Return Σw; a tensor where reading it would wait for a device."""
        self._wait()
        total, weights_on_devices = self._numbers.tolist()
        if not weights_on_devices:
            return float(total)
        weight = torch.as_tensor(self._weight, dtype=torch.float64).to(self._device, copy=True)
        dist.all_reduce(weight)
        return weight

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


class AlongGradients:
    """Σw as the gradient of a parameter that takes no part in the forward.

    The wrapper divides by the number of processes; `send` multiplies by it. Numbers of samples stay exact.

    Args:
        weight: The parameter, a scalar of float32 or wider.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        self._weight = weight
        self._processes = dist.get_world_size()
        self._relative_tolerance = 4 * torch.finfo(weight.dtype).eps
        # The last weight, and the gradient that is sent for it: most windows have the same weight.
        self._last_weight: Weight = 0
        self._gradient = torch.zeros_like(weight)

    def send(self, weight: Weight) -> None:
        """Send this process's weight: this gradient is the first one to be ready."""
        # Tensors are not compared: that could wait for a device.
        is_tensor = isinstance(weight, Tensor) or isinstance(self._last_weight, Tensor)
        if is_tensor or weight != self._last_weight:
            self._last_weight = weight
            self._gradient = torch.as_tensor(weight * self._processes).to(self._weight)
        self._weight.grad = None
        torch.autograd.backward(self._weight, self._gradient)

    def total(self) -> float:
        """Return Σw."""
        assert self._weight.grad is not None
        total: float = self._weight.grad.item()
        if not math.isfinite(total):
            return total
        # The wrapper's division rounds, so a number of samples may miss the whole number by a little.
        nearest = math.floor(total + 0.5)
        if abs(total - nearest) <= self._relative_tolerance * total:
            return nearest
        return total


def average_gradients(window: AccumulationWindow, optimizer: Optimizer, total: float | Tensor, divided_by: int) -> bool:
    """Turn summed gradients into the weighted mean over all processes.

    Args:
        window: The window of this process.
        optimizer: The optimiser that holds the parameters.
        total: Σw of all processes.
        divided_by: The number by which the exchange has divided the sums.

    Returns:
        Whether Σw is 0. Then no parameter keeps a gradient, as on one device.
    """
    factor = window.correction(total, divided_by)
    if factor is not None:
        foreach.multiply_([p.grad for p in optimizer_parameters(optimizer) if p.grad is not None], factor)
    if isinstance(total, Tensor) or total != 0:
        return False
    for parameter in optimizer_parameters(optimizer):
        parameter.grad = None
    return True
