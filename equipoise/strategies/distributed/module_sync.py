"""Checks that processes have the same module, and BatchNorm layers that compute over all processes."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from equipoise.errors import ConfigurationError
from equipoise.parallel.communication.object_exchange import gather_objects

__all__ = ["check_same_modules", "share_batch_statistics"]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def check_same_modules(module: nn.Module) -> None:
    """Check that the module has the same parameters and buffers in all processes.

    Raises:
        ConfigurationError: If a parameter has no shape yet, or if processes differ. Then every process raises, and
            the message names the first difference.
    """
    kind = type(module).__name__
    # 1. All parameters have shapes.
    for name, tensor in module.named_parameters():
        if is_lazy(tensor):
            raise ConfigurationError(
                f"{name} has no shape yet, so processes cannot agree on it. Run a batch through {kind}"
                " before fit, or give the layer its sizes."
            )

    # 2. All processes compare the same descriptions, so all of them raise or none.
    descriptions = gather_objects(_describe(module))
    first = descriptions[0]
    for rank, description in enumerate(descriptions):
        if description == first:
            continue
        on_first, on_rank = _first_difference(first, description)
        raise ConfigurationError(
            f"{kind} differs between processes: rank 0 has {on_first}, rank {rank} has"
            f" {on_rank}. Build it from the same configuration everywhere."
        )


def _describe(module: nn.Module) -> list[str]:
    """Return the name, shape, dtype and kind of each parameter and buffer."""
    descriptions = []
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        dtype = str(tensor.dtype).removeprefix("torch.")
        kind = "" if tensor.requires_grad else ", frozen or a buffer"
        descriptions.append(f"{name} of shape {list(tensor.shape)}, {dtype}{kind}")
    return descriptions


def _first_difference(left: list[str], right: list[str]) -> tuple[str, str]:
    """Return the first difference on either side: descriptions of two tensors, or the numbers of tensors."""
    for one, two in zip(left, right, strict=False):
        if one != two:
            return one, two
    return f"{len(left)} tensors", f"{len(right)} tensors"


def share_batch_statistics(module: nn.Module, device: torch.device) -> Callable[[], None]:
    """Replace BatchNorm layers by torch's SyncBatchNorm, which shares parameters and buffers with them.

    Returns:
        A function that puts the layers back.

    Raises:
        ConfigurationError: If torch has no such layer for the device.
    """
    if device.type != "cuda":
        raise ConfigurationError(
            "sync_batchnorm=True needs CUDA devices: torch has no such layer for others. Leave it out, or take layers"
            " without batch statistics."
        )
    convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
    # A parent, the name of its layer, and the layer.
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    # The loop changes the modules, so it runs over copies of the lists.
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, _BATCH_NORMS):
                synchronised = convert(layer)
                setattr(parent, name, synchronised)
                replaced.append((parent, name, layer))

    def restore() -> None:
        for parent, name, layer in replaced:
            layer.train(getattr(parent, name).training)
            setattr(parent, name, layer)

    return restore
