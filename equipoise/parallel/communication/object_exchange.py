"""Exchange objects between the processes of a group.

Torch's own functions for that unpickle whatever arrives. Here the processes exchange bytes, and unpickle them only if a
process of this run has written them; see `authentication`.
"""

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.parallel.communication.process_group import host_group
from equipoise.parallel.payload.object_bytes import dumps, loads

__all__ = ["broadcast_object", "exchange_number", "gather_objects"]

T = TypeVar("T")


def exchange_number(number: int) -> list[int]:
    """Return the numbers of all processes, in the order of their ranks."""
    return [int(item) for item in _all_gather(torch.tensor([number]), host_group())]


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all processes, in the order of their ranks.

    Args:
        value: Value of this process.
        group: Process group. Default: all processes.
    """
    if group is None:
        group = host_group()
    content = _encode(value, _device_of(group))

    # 1. Exchange the lengths, since a collective needs tensors of equal size.
    sizes = [int(length) for length in _all_gather(_length_of(content), group)]

    # 2. Exchange the contents, padded to the longest, and decode each without its padding.
    padded = content.new_zeros(max(sizes))
    padded[: len(content)] = content
    received = _all_gather(padded, group)
    return [_decode(buffer[:size]) for buffer, size in zip(received, sizes, strict=True)]


def _all_gather(tensor: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the tensors of all processes, which are of one shape."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


def broadcast_object(value: T, source: int = 0) -> T:
    """Return the value of one process in all processes. In the source it is the object itself, not a copy.

    Args:
        value: Value of the source; other processes may pass anything.
        source: Rank of the process that has the value. Default: 0.
    """
    group = host_group()
    device = _device_of(group)
    is_source = dist.get_rank() == source
    if is_source:
        content = _encode(value, device)
    else:
        content = torch.empty(0, device=device)
    length = _length_of(content)
    dist.broadcast(length, source, group=group)
    if not is_source:
        content = torch.zeros(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(content, source, group=group)
    if is_source:
        return value
    received: T = _decode(content)
    return received


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device on which the group exchanges tensors."""
    backend = dist.get_backend(group)
    if backend == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _length_of(content: Tensor) -> Tensor:
    """Return the number of bytes as a tensor on the same device."""
    return torch.tensor([len(content)], device=content.device)


def _encode(value: Any, device: torch.device) -> Tensor:
    # The tensor shares the memory of the bytes, which must be writable.
    data = bytearray(dumps(value))
    return torch.frombuffer(data, dtype=torch.uint8).to(device)


def _decode(content: Tensor) -> Any:
    return loads(content.cpu().numpy().tobytes())
