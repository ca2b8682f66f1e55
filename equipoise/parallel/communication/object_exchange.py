"""Exchange objects between the processes of a group.

Torch's own functions for that unpickle whatever arrives. Here the processes exchange bytes, and unpickle them only if a
process of this run has written them; see `authentication`.
"""

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.parallel.communication.process_group import host_group
from equipoise.parallel.payload.shared_payload import dumps, loads

__all__ = ["broadcast_object", "gather_objects"]

T = TypeVar("T")


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all processes, in the order of their ranks.

    Args:
        value: Value of this process.
        group: Process group. Default: all processes.
    """
    if group is None:
        group = host_group()
    device = _device_of(group)
    num_processes = dist.get_world_size(group)
    content = _encode(value, device)

    # 1. Exchange the lengths, since a collective needs tensors of equal size.
    length = torch.tensor([content.numel()], device=device)
    lengths = []
    for _ in range(num_processes):
        lengths.append(_empty_length(device))
    dist.all_gather(lengths, length, group=group)
    sizes = [int(size) for size in lengths]
    longest = max(sizes)

    # 2. Exchange the contents, padded to the longest.
    padded = _empty_content(longest, device)
    padded[: content.numel()] = content
    buffers = []
    for _ in range(num_processes):
        buffers.append(_empty_content(longest, device))
    dist.all_gather(buffers, padded, group=group)

    # 3. Decode each without its padding.
    values = []
    for buffer, size in zip(buffers, sizes, strict=True):
        content_of_process = buffer[:size]
        values.append(_decode(content_of_process))
    return values


def broadcast_object(value: T, source: int = 0) -> T:
    """Return the value of one process in all processes. The source receives the object itself, not a copy.

    Args:
        value: Value of the source; other processes may pass anything.
        source: Rank of the process that has the value. Default: 0.
    """
    group = host_group()
    device = _device_of(group)
    if dist.get_rank() == source:
        content = _encode(value, device)
        length = torch.tensor([content.numel()], device=device)
        dist.broadcast(length, source, group=group)
        dist.broadcast(content, source, group=group)
        return value
    length = _empty_length(device)
    dist.broadcast(length, source, group=group)
    content = _empty_content(int(length), device)
    dist.broadcast(content, source, group=group)
    received: T = _decode(content)
    return received


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device on which the group exchanges tensors."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _empty_length(device: torch.device) -> Tensor:
    """Return a tensor that receives a number of bytes."""
    return torch.zeros(1, dtype=torch.int64, device=device)


def _empty_content(length: int, device: torch.device) -> Tensor:
    """Return a tensor that receives bytes."""
    return torch.zeros(length, dtype=torch.uint8, device=device)


def _encode(value: Any, device: torch.device) -> Tensor:
    content = bytearray(dumps(value))
    return torch.frombuffer(content, dtype=torch.uint8).to(device)


def _decode(content: Tensor) -> Any:
    array = content.cpu().numpy()
    return loads(array.tobytes())
