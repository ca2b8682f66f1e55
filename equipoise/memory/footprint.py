"""Bytes of parameters, gradients and optimiser state on a device."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

__all__ = ["Footprint", "footprint_of"]


@dataclass(frozen=True)
class Footprint:
    """Bytes on one device.

    Attributes:
        parameters: Parameters and buffers.
        gradients: Their gradients, as far as there are any.
        optimizer_state: The tensors of all optimisers' states.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer_state


def footprint_of(module: nn.Module, optimizers: Sequence[Optimizer], device: str | torch.device) -> Footprint:
    """Counts what a module and its optimisers hold on a device; storages that are shared count once.

    Args:
        module: The module.
        optimizers: Its optimisers.
        device: The device. One on which nothing of the module lies is taken to hold a copy of parameters and gradients.

    Example:
        >>> footprint_of(nn.Linear(3, 2), [], "cpu")
        Footprint(parameters=32, gradients=0, optimizer_state=0)
    """
    device = torch.device(device)
    parameters = list(module.parameters())
    tensors = [*parameters, *module.buffers()]
    if not any(_lies_on(tensor, device) for tensor in tensors):
        return Footprint(_bytes(tensors), _bytes(p.grad for p in parameters))
    states = [value for each in optimizers for state in each.state.values() for value in state.values()]
    return Footprint(
        _bytes(tensors, device),
        _bytes((p.grad for p in parameters), device),
        _bytes((value for value in states if isinstance(value, Tensor)), device),
    )


def _lies_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and (device.index is None or tensor.device.index == device.index)


def _bytes(tensors: Iterable[Tensor | None], device: torch.device | None = None) -> int:
    storages: dict[int, int] = {}
    for tensor in tensors:
        if tensor is None or tensor.layout is not torch.strided or (device and not _lies_on(tensor, device)):
            continue
        if not (tensor.is_meta or is_lazy(tensor)):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
