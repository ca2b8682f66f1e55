"""Shards of this process, of tensors that are whole or lie in a sharded checkpoint."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from equipoise.parallel.shards.sources import source_of

__all__ = ["shard_like", "take_shards"]


def take_shards(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Replace whole tensors of a module's state by this process's shards.

    Args:
        module: The module, or a copy of it.
        state: The state, which is to be loaded.
        prefix: The prefix of the names of the module's tensors in it.
    """
    name = prefix.removesuffix(".")
    present: dict[str, Tensor] = dict(module.named_parameters(name, remove_duplicate=False))
    present.update(module.named_buffers(name, remove_duplicate=False))
    for key, tensor in present.items():
        if key in state:
            state[key] = shard_like(tensor, state[key])


def shard_like(like: Any, value: Any) -> Any:
    """Return this process's shard of a tensor, where another tensor of the same shape is in shards.

    Args:
        like: The other tensor.
        value: The tensor, or a placeholder for one in a sharded checkpoint, of which only what is needed is read.
            Everything else is returned as it is.
    """
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    source = source_of(value)
    # A scalar, or a statistic of rows, is whole in each process.
    is_in_shards = isinstance(like, DTensor) and value.shape == like.shape and value.ndim > 0
    if not is_in_shards:
        if source is None:
            return value
        return source.whole()
    if source is not None:
        shard = torch.zeros_like(like.detach(), dtype=value.dtype)
        source.fill(shard)
        return shard
    # Each process has the whole value, so nothing is sent. Torch cuts it on the device of the mesh.
    value = value.to(like.device)
    shard = distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return shard.to(like.device)
