"""Lend layers to another device for a call, and return them afterwards.

Unlike a move there and back, this keeps the storage of the values. cuDNN needs the weights of a layer in one storage.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.interop.torch.dispatch import OnOperation, OperationWatch, unwatched

__all__ = ["computed_on", "is_of_torch", "lent"]


@contextmanager
def lent(layer: nn.Module | None, device: torch.device) -> Iterator[None]:
    """Give the tensors of a layer copies of their values on a device within the context.

    Args:
        layer: The layer; None: nothing is lent.
        device: The device.
    """
    tensors: list[Tensor] = []
    if layer is not None:
        tensors = [*layer.parameters(), *layer.buffers()]
    with _values_on(tensors, device):
        yield


@contextmanager
def _values_on(tensors: Sequence[Tensor], device: torch.device) -> Iterator[None]:
    elsewhere = [tensor for tensor in tensors if tensor.device != device]
    # A watch that moves arguments to the device would take the original values there, for good. Copies that inference
    # mode creates could not become values of a parameter.
    with unwatched(), torch.inference_mode(False), torch.no_grad():
        original_values = [tensor.data for tensor in elsewhere]
        for tensor in elsewhere:
            tensor.data = tensor.data.to(device)
    try:
        yield
    finally:
        with unwatched(), torch.inference_mode(False), torch.no_grad():
            for tensor, values in zip(elsewhere, original_values, strict=True):
                # A call in training mode changes running statistics.
                if not isinstance(tensor, nn.Parameter):
                    values.copy_(tensor.data)
                tensor.data = values


@contextmanager
def lent_when_called(network: nn.Module, device: torch.device) -> Iterator[None]:
    """Give every submodule copies of its values on a device while it is called.

    Args:
        network: The network.
        device: The device.
    """
    # One entry for each call that runs, the innermost last.
    loans: list[ExitStack] = []

    def lend(module: nn.Module, args: Any) -> None:
        # Torch's layers use tensors of their submodules without calling these.
        recurse = is_of_torch(module)
        parameters = module.parameters(recurse=recurse)
        buffers = module.buffers(recurse=recurse)
        loan = ExitStack()
        loans.append(loan)
        loan.enter_context(_values_on([*parameters, *buffers], device))

    def end_loan(module: nn.Module, args: Any, output: Any) -> None:
        loans.pop().close()

    with ExitStack() as hooks:
        for module in network.modules():
            if module is network or _is_container(module):
                continue
            hooks.enter_context(module.register_forward_pre_hook(lend))
            hooks.enter_context(module.register_forward_hook(end_loan, always_call=True))
        try:
            yield
        finally:
            # After an error some calls have not ended.
            while loans:
                loans.pop().close()


@contextmanager
def computed_on(
    device: torch.device,
    network: nn.Module,
    module: nn.Module,
    on_operation: OnOperation | None = None,
) -> Iterator[None]:
    """Compute the forward of a network on a device within the context, wherever its layers are.

    Args:
        device: The device.
        network: The network.
        module: The module to which it belongs.
        on_operation: See `OperationWatch`. Default: no operation is reported.
    """
    is_elsewhere = any(tensor.device != device for tensor in [*module.parameters(), *module.buffers()])
    with ExitStack() as stack:
        if is_elsewhere:
            stack.enter_context(lent_when_called(network, device))
            # The watch also moves tensors outside of layers to the device.
            on_operation = on_operation or _ignore
        if on_operation is not None:
            watch = OperationWatch(on_operation, device if is_elsewhere else None)
            watch.start()
            stack.callback(watch.stop)
        yield


def _ignore(name: str, result: Any, args: Any) -> None:
    """Do nothing for an operation."""


def _is_container(module: nn.Module) -> bool:
    """Return True if a module only calls others. All of them together may be too large for one device."""
    return isinstance(module, nn.Sequential | nn.TransformerEncoder | nn.TransformerDecoder | nn.Transformer)


def is_of_torch(module: nn.Module) -> bool:
    """Return True if a module is one of torch's own layers."""
    return type(module).__module__.startswith("torch.")
