"""Lend layers to another device for a call, and return them afterwards.

Unlike a move there and back this keeps the memory that the values lie in, which cuDNN wants in one piece.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

__all__ = ["is_of_torch", "lent", "lent_when_called"]


@contextmanager
def lent(layer: nn.Module | None, device: torch.device) -> Iterator[None]:
    """Let the tensors of a layer have copies of their values on a device for a while."""
    tensors = [] if layer is None else [*layer.parameters(), *layer.buffers()]
    with _values_on(tensors, device):
        yield


@contextmanager
def _values_on(tensors: Sequence[Tensor], device: torch.device) -> Iterator[None]:
    elsewhere = [tensor for tensor in tensors if tensor.device != device]
    before = [tensor.data for tensor in elsewhere]
    with torch.inference_mode(False), torch.no_grad():
        for tensor in elsewhere:
            tensor.data = tensor.data.to(device)
    try:
        yield
    finally:
        with torch.inference_mode(False), torch.no_grad():
            for tensor, values in zip(elsewhere, before, strict=True):
                tensor.data = values


@contextmanager
def lent_when_called(network: nn.Module, device: torch.device) -> Iterator[None]:
    """Let every submodule have its values on a device while it is called."""
    lent: list[ExitStack] = []
    handles: list[RemovableHandle] = []

    def lend(part: nn.Module, args: Any) -> None:
        tensors = [*part.parameters(recurse=is_of_torch(part)), *part.buffers(recurse=is_of_torch(part))]
        stack = ExitStack()
        lent.append(stack)
        stack.enter_context(_values_on(tensors, device))

    def take_back(part: nn.Module, args: Any, output: Any) -> None:
        lent.pop().close()

    try:
        for part in network.modules():
            if part is not network and not _is_container(part):
                handles.append(part.register_forward_pre_hook(lend))
                handles.append(part.register_forward_hook(take_back, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        while lent:
            lent.pop().close()


def _is_container(part: nn.Module) -> bool:
    """Return whether a module only calls others, which may be too many for one device."""
    return isinstance(part, nn.Sequential | nn.TransformerEncoder | nn.TransformerDecoder | nn.Transformer)


def is_of_torch(part: nn.Module) -> bool:
    """Return whether a module is one of torch's own layers."""
    return type(part).__module__.startswith("torch.")
