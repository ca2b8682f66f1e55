"""Name the tensor behind torch's errors about tensors on different devices."""

from contextlib import suppress
from typing import Any

from torch import nn

from equipoise.errors import StepError
from equipoise.memory.out_of_memory import is_out_of_memory
from equipoise.parallel.batches.splitting import entries_of
from equipoise.trainer.data.dataloader_iter import DataLoaderIter
from equipoise.trainer.diagnostics.error_notes import add_notes

__all__ = ["EXPLAINED", "explain_device_mismatch"]

EXPLAINED = (RuntimeError, TypeError, IndexError, ValueError)

_MESSAGES = ("on the same device", "not on the expected device")


def explain_device_mismatch(error: Exception, module: nn.Module, batch: Any) -> None:
    """Add notes to an error of a step; raise a better one if the error is that tensors lie on different devices.

    Args:
        error: What torch raised.
        module: The user's module.
        batch: The batch that was being computed, or the iterator from which the step pulls it.

    Raises:
        StepError: Naming the batch's entries, parameters and buffers that lie apart from the others, and the devices.
    """
    if is_out_of_memory(error):
        return
    if isinstance(batch, DataLoaderIter):
        batch = batch.batch
    with suppress(Exception):  # the user's `__repr__` or `__len__` may fail, and the error is what they must see
        add_notes(error, module, batch)
    if not isinstance(error, RuntimeError) or not any(part in str(error) for part in _MESSAGES):
        return
    places = {f"parameter {name!r}": p.device for name, p in module.named_parameters()}
    places |= {f"buffer {name!r}": b.device for name, b in module.named_buffers()}
    places |= {f"batch{path}": tensor.device for path, tensor in entries_of(batch)}
    devices = list(places.values())
    if len(set(devices)) == 1:
        raise StepError(
            "Tensors of one operation lie on different devices. The batch and all parameters and buffers are on"
            f" {devices[0]}, so {type(module).__name__} makes one elsewhere: make it on `self.device`, or register"
            f" it with `register_buffer`. Torch says: {error}"
        ) from error
    if not devices:
        return
    common = max(set(devices), key=devices.count)
    astray = [f"{name} is on {device}" for name, device in places.items() if device != common]
    listed = "; ".join(astray[:5]) + (f"; and {len(astray) - 5} more" if len(astray) > 5 else "")
    raise StepError(
        f"Tensors of one operation lie on different devices: {listed}, while the rest is on {common}. Tensors that"
        " the module makes belong on `self.device`; constant ones are best registered with `register_buffer`."
    ) from error
