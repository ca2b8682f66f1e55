"""Name the tensor behind torch's errors about tensors on different devices."""

from contextlib import suppress
from typing import Any

import torch
from torch import nn

from equipoise.errors import StepError
from equipoise.memory.out_of_memory import is_out_of_memory
from equipoise.trainer.diagnostics.error_notes import add_notes
from equipoise.tree import entries_of

__all__ = ["explain_device_mismatch"]

# Parts of the messages of torch.
_MESSAGES = ("on the same device", "not on the expected device")


def explain_device_mismatch(error: Exception, module: nn.Module, batch: Any) -> None:
    """Add notes to an error of a step; raise a better one if tensors are on different devices.

    Args:
        error: The error that torch has raised.
        module: The user's module.
        batch: The batch of the step.

    Raises:
        StepError: If tensors are on different devices. The message names the entries of the batch, the parameters and
            the buffers that are not on the most frequent device.
    """
    if is_out_of_memory(error):
        return
    # The user's `__repr__` or `__len__` may fail, but the user must see the error itself.
    with suppress(Exception):
        add_notes(error, module, batch)
    if not isinstance(error, RuntimeError) or not any(part in str(error) for part in _MESSAGES):
        return

    # 1. All tensors are on one device, so the step has created another one.
    tensor_devices = _devices_of_tensors(module, batch)
    devices = list(tensor_devices.values())
    if len(set(devices)) == 1:
        raise StepError(
            "Tensors of one operation lie on different devices. The batch and all parameters and buffers are on"
            f" {devices[0]}, so {type(module).__name__} makes one elsewhere: make it on `self.device`, or register"
            f" it with `register_buffer`. Torch says: {error}"
        ) from error
    if not devices:
        return

    # 2. Some are on another device than most.
    common = max(set(devices), key=devices.count)
    exceptions = [f"{name} is on {device}" for name, device in tensor_devices.items() if device != common]
    listed = "; ".join(exceptions[:5])
    if len(exceptions) > 5:
        listed += f"; and {len(exceptions) - 5} more"
    raise StepError(
        f"Tensors of one operation lie on different devices: {listed}, while the rest is on {common}. Tensors that"
        " the module makes belong on `self.device`; constant ones are best registered with `register_buffer`."
    ) from error


def _devices_of_tensors(module: nn.Module, batch: Any) -> dict[str, torch.device]:
    """Return the device of each parameter, buffer and entry of the batch, by a description."""
    devices = {f"parameter {name!r}": parameter.device for name, parameter in module.named_parameters()}
    devices |= {f"buffer {name!r}": buffer.device for name, buffer in module.named_buffers()}
    devices |= {f"batch{path}": tensor.device for path, tensor in entries_of(batch)}
    return devices
