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
        parameters: Bytes of parameters and buffers.
        gradients: Bytes of the present gradients.
        optimizer_state: Bytes of the tensors in all optimisers' states.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        return self.parameters + self.gradients + self.optimizer_state


def footprint_of(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    device: str | torch.device,
) -> Footprint:
    """Count the bytes of a module and its optimisers on a device; a shared storage counts once.

    Args:
        module: The module.
        optimizers: Its optimisers.
        device: The device. If no tensor of the module lies on it, it counts as one with a copy of parameters and
            gradients.

    Example:
        >>> footprint_of(nn.Linear(3, 2), [], "cpu")
        Footprint(parameters=32, gradients=0, optimizer_state=0)
    """
    device = torch.device(device)
    # 1. List the module's tensors.
    parameters = list(module.parameters())
    tensors = [*parameters, *module.buffers()]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # 2. A replica has parameters and gradients of its own, and no optimiser.
    has_tensors_of_module = any(_lies_on(tensor, device) for tensor in tensors)
    if not has_tensors_of_module:
        return Footprint(
            parameters=_bytes(tensors),
            gradients=_bytes(gradients),
        )
    # 3. Elsewhere the tensors that lie on the device count.
    return Footprint(
        parameters=_bytes(tensors, device),
        gradients=_bytes(gradients, device),
        optimizer_state=_bytes(_state_tensors(optimizers), device),
    )


def _state_tensors(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the tensors in the states of optimisers."""
    tensors: list[Tensor] = []
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    tensors.append(value)
    return tensors


def _lies_on(tensor: Tensor, device: torch.device) -> bool:
    """Return whether a tensor lies on a device; a device without an index stands for all of its kind."""
    place = tensor.device
    if place.type != device.type:
        return False
    return device.index is None or place.index == device.index


def _bytes(tensors: Iterable[Tensor], device: torch.device | None = None) -> int:
    """Return the bytes of the tensors' storages; only of those on a device, if there is one."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        # Sparse tensors, and those without memory, have no storage to read.
        if tensor.layout is not torch.strided:
            continue
        if tensor.is_meta or is_lazy(tensor):
            continue
        if device is not None and not _lies_on(tensor, device):
            continue
        storage = _in_this_process(tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _in_this_process(tensor: Tensor) -> Tensor:
    """Return the shard of a tensor that is shared out over processes; every other tensor is here as a whole."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    shard: Tensor = to_local()
    return shard
