"""Synchronise a module over processes: the same parameters, and BatchNorm over all of them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from equipoise.errors import ConfigurationError
from equipoise.parallel.communication.object_exchange import gather_objects

__all__ = ["check_same_modules", "copy_from_first", "share_batch_statistics"]


def check_same_modules(module: nn.Module) -> None:
    """Checks that the module has the same parameters and buffers in all processes.

    Raises:
        ConfigurationError: In every process, naming the first difference.
    """
    for name, tensor in module.named_parameters():
        if is_lazy(tensor):
            raise ConfigurationError(
                f"{name} has no shape yet, so processes cannot agree on it. Run a batch through {type(module).__name__}"
                " before fit, or give the layer its sizes."
            )
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    own = [(name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad) for name, tensor in state.items()]
    all_of_them = gather_objects(own)
    first = all_of_them[0]
    for rank, other in enumerate(all_of_them):
        if other == first:
            continue
        index = next((i for i, (one, two) in enumerate(zip(first, other, strict=False)) if one != two), -1)
        one, two = (each[index] if index >= 0 else f"{len(each)} tensors" for each in (first, other))
        raise ConfigurationError(
            f"{type(module).__name__} differs between processes: rank 0 has {_described(one)}, rank {rank} has"
            f" {_described(two)}. Build it from the same configuration everywhere."
        )


def _described(entry: Any) -> str:
    if isinstance(entry, str):
        return entry
    name, shape, dtype, learned = entry
    return f"{name} of shape {list(shape)}, {dtype.removeprefix('torch.')}{'' if learned else ', frozen or a buffer'}"


def copy_from_first(tensors: Iterable[Tensor]) -> None:
    """Gives all processes the first one's values.

    Args:
        tensors: Parameters or buffers, the same in all processes.
    """
    with torch.no_grad():
        for tensor in tensors:
            contiguous = tensor.detach().contiguous()
            dist.broadcast(contiguous, 0)
            if contiguous.data_ptr() != tensor.data_ptr():
                tensor.copy_(contiguous)


def share_batch_statistics(module: nn.Module, device: torch.device) -> Callable[[], None]:
    """Replaces BatchNorm layers by torch's SyncBatchNorm, which shares parameters and buffers with them.

    Args:
        module: The user's module, on its device.
        device: The device.

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
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
                setattr(parent, name, convert(layer))
                replaced.append((parent, name, layer))

    def restore() -> None:
        for parent, name, layer in replaced:
            layer.train(getattr(parent, name).training)
            setattr(parent, name, layer)

    return restore
