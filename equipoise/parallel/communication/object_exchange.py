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


def gather_objects(
    value: Any,
    group: dist.ProcessGroup | None = None,
) -> list[Any]:
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
    size_here = content.numel()

    # 1. Exchange the lengths, since a collective needs tensors of equal size.
    length = _length_of(content)
    lengths = []
    for _ in range(num_processes):
        received_length = _empty_length(device)
        lengths.append(received_length)
    dist.all_gather(lengths, length, group=group)
    sizes = [int(size) for size in lengths]
    longest = max(sizes)

    # 2. Exchange the contents, padded to the longest.
    padded = _empty_content(longest, device)
    padded[:size_here] = content
    buffers = []
    for _ in range(num_processes):
        buffer = _empty_content(longest, device)
        buffers.append(buffer)
    dist.all_gather(buffers, padded, group=group)

    # 3. Decode each without its padding.
    values = []
    for buffer, size in zip(buffers, sizes, strict=True):
        content_of_process = buffer[:size]
        value_of_process = _decode(content_of_process)
        values.append(value_of_process)
    return values


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
        length = _length_of(content)
        dist.broadcast(length, source, group=group)
        dist.broadcast(content, source, group=group)
        return value
    # 2. The other processes receive them.
    length = _empty_length(device)
    dist.broadcast(length, source, group=group)
    size = int(length)
    content = _empty_content(size, device)
    dist.broadcast(content, source, group=group)
    received: T = _decode(content)
    return received


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device on which the group exchanges tensors."""
    backend = dist.get_backend(group)
    if backend == "nccl":
        index = torch.cuda.current_device()
        return torch.device("cuda", index)
    return torch.device("cpu")


def _length_of(content: Tensor) -> Tensor:
    """Return the number of bytes as a tensor on the same device."""
    size = content.numel()
    return torch.tensor([size], device=content.device)


def _empty_length(device: torch.device) -> Tensor:
    """Return a tensor that receives a number of bytes."""
    return torch.zeros(1, dtype=torch.int64, device=device)


def _empty_content(length: int, device: torch.device) -> Tensor:
    """Return a tensor that receives bytes."""
    return torch.zeros(length, dtype=torch.uint8, device=device)


def _encode(value: Any, device: torch.device) -> Tensor:
    # The tensor shares the memory of the bytes, which must be writable.
    data = bytearray(dumps(value))
    content = torch.frombuffer(data, dtype=torch.uint8)
    return content.to(device)


def _decode(content: Tensor) -> Any:
    content_on_host = content.cpu()
    array = content_on_host.numpy()
    data = array.tobytes()
    return loads(data)
