"""Exchange objects between the processes of a group.

Torch's own functions for that unpickle whatever arrives. Here bytes are exchanged, and read only if a process of this
run has written them; see `authentication`.
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
        value: That of this process.
        group: The process group. Default: all processes.
    """
    group, device = _place(group)
    count = dist.get_world_size(group)
    own = _bytes_of(value, device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(count)]
    dist.all_gather(lengths, torch.tensor([own.numel()], device=device), group=group)
    sizes = [int(length) for length in lengths]
    longest = max(sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: own.numel()] = own
    contents = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(count)]
    dist.all_gather(contents, padded, group=group)
    return [_value_of(content[:size]) for content, size in zip(contents, sizes, strict=True)]


def broadcast_object(value: T, source: int = 0) -> T:
    """Return the value of one process, in all; there it is the very object.

    Args:
        value: That of the source; others give anything.
        source: The rank of the process.
    """
    group, device = _place(None)
    is_source = dist.get_rank() == source
    content = _bytes_of(value, device) if is_source else torch.zeros(0, dtype=torch.uint8, device=device)
    length = torch.tensor([content.numel()], device=device)
    dist.broadcast(length, source, group=group)
    if not is_source:
        content = torch.zeros(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(content, source, group=group)
    return value if is_source else _value_of(content)


def _place(group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup | None, torch.device]:
    """Return the group through which bytes go, and where they lie."""
    if group is None:
        group = host_group()
    if dist.get_backend(group) == "nccl":
        return group, torch.device("cuda", torch.cuda.current_device())
    return group, torch.device("cpu")


def _bytes_of(value: Any, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(dumps(value)), dtype=torch.uint8).to(device)


def _value_of(content: Tensor) -> Any:
    return loads(content.cpu().numpy().tobytes())
