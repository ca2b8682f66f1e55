"""Exchange the parameters and buffers of a module for tensors of the same shape that have no memory."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from equipoise.extensions.common.interop import is_fake, usual_tensors

__all__ = ["convert_without_memory", "empty_like_real", "exchange_tensors", "has_fake_tensors"]


def has_fake_tensors(module: nn.Module) -> bool:
    """Return True if a parameter or buffer of a module has no memory."""
    return any(is_fake(tensor) for tensor in [*module.parameters(), *module.buffers()])


def exchange_tensors(module: nn.Module, exchange: Callable[[Tensor], Tensor]) -> None:
    """Exchange the parameters and buffers of a module; tensors that several submodules share stay shared."""
    exchanged: dict[int, Tensor] = {}
    # References to the old tensors: the id of a freed one could be that of a new one.
    old: list[Tensor] = []
    # Each submodule registers its own, also those that others register as well.
    for submodule in module.modules():
        parameters = submodule.named_parameters(recurse=False, remove_duplicate=False)
        buffers = submodule.named_buffers(recurse=False, remove_duplicate=False)
        for name, tensor in [*parameters, *buffers]:
            identity = id(tensor)
            if identity not in exchanged:
                old.append(tensor)
                new = exchange(tensor.detach())
                if isinstance(tensor, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                exchanged[identity] = new
            setattr(submodule, name, exchanged[identity])


def empty_like_real(tensor: Tensor) -> Tensor:
    """Return a tensor of the CPU with shape, strides and dtype of another; without memory among fake tensors."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)


def convert_without_memory(module: nn.Module, convert: Callable[[nn.Module], None]) -> None:
    """Convert a module of tensors without memory, which `module.to(dtype)` refuses to convert as they are."""
    # Tensors on the device "meta" have no memory either, and can be converted.
    with usual_tensors():
        exchange_tensors(module, _on_meta)
        convert(module)
    exchange_tensors(module, empty_like_real)


def _on_meta(tensor: Tensor) -> Tensor:
    """Return a tensor of the device "meta", of which torch knows the shape only."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
