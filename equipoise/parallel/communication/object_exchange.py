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

__all__ = ["broadcast_object", "exchange_number", "gather_objects"]

T = TypeVar("T")


def exchange_number(number: int) -> list[int]:
    """Return the numbers of all processes, in the order of their ranks."""
    group = host_group()
    here = torch.tensor([number], dtype=torch.int64)
    gathered = [torch.empty_like(here) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, here, group=group)
    return [int(received) for received in gathered]


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all processes, in the order of their ranks.

    Args:
        value: Value of this process.
        group: Process group. Default: all processes.
    """
    if group is None:
        group = host_group()
    device = _device_of(group)
    processes = range(dist.get_world_size(group))
    content = _encode(value, device)

    # 1. Exchange the lengths, since a collective needs tensors of equal size.
    length = torch.tensor([content.numel()], device=device)
    lengths = [torch.empty_like(length) for _ in processes]
    dist.all_gather(lengths, length, group=group)
    sizes = [int(size) for size in lengths]

    # 2. Exchange the contents, padded to the longest.
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: content.numel()] = content
    buffers = [torch.empty_like(padded) for _ in processes]
    dist.all_gather(buffers, padded, group=group)

    # 3. Decode each without its padding.
    return [_decode(buffer[:size]) for buffer, size in zip(buffers, sizes, strict=True)]


def broadcast_object(value: T, source: int = 0) -> T:
    """Return the value of one process in all processes. The source receives the object itself, not a copy.

    Args:
        value: Value of the source; other processes may pass anything.
        source: Rank of the process that has the value. Default: 0.
    """
    group = host_group()
    device = _device_of(group)
    # 1. The source sends the length and the content.
    if dist.get_rank() == source:
        content = _encode(value, device)
        dist.broadcast(torch.tensor([content.numel()], device=device), source, group=group)
        dist.broadcast(content, source, group=group)
        return value
    # 2. The other processes receive them.
    length = torch.zeros(1, dtype=torch.int64, device=device)
    dist.broadcast(length, source, group=group)
    content = torch.zeros(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(content, source, group=group)
    received: T = _decode(content)
    return received


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device on which the group exchanges tensors."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _encode(value: Any, device: torch.device) -> Tensor:
    # The tensor shares the memory of the bytes, which must be writable.
    return torch.frombuffer(bytearray(dumps(value)), dtype=torch.uint8).to(device)


def _decode(content: Tensor) -> Any:
    return loads(content.cpu().numpy().tobytes())
