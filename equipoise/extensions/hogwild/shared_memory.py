"""Tensors in memory that the processes of one machine share.

Objects that are sent to a process are mapped privately there, so memory is shared once the processes run. It has no
name in a folder where the system allows that, so nothing remains of a process that is killed.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from equipoise.parallel.communication.processes import Processes

__all__ = ["share_parameters", "shared_like"]

T = TypeVar("T")

# Tensors begin at multiples of a cache line, so that processes that step different ones do not share lines.
_ALIGNMENT = 64


def shared_like(tensors: Sequence[Tensor], processes: Processes) -> list[Tensor]:
    """Return tensors in shared memory, with the values of the main process. All processes call this together.

    Args:
        tensors: Tensors on the CPU, of the same shapes and dtypes in all processes.
        processes: The processes, on one machine.
    """
    # 1. The place of each tensor.
    begins = []
    size = 0
    for tensor in tensors:
        begins.append(size)
        nbytes = tensor.numel() * tensor.element_size()
        size += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    if not size:
        return list(tensors)

    # 2. The memory, which every process opens before the main one closes the way to it.
    handle = None
    path = ""
    if processes.is_main:
        handle, path = _create(size)
    try:
        path = processes.broadcast(path)
        memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        shared = []
        for tensor, begin in zip(tensors, begins, strict=True):
            nbytes = tensor.numel() * tensor.element_size()
            shared.append(memory[begin : begin + nbytes].view(tensor.dtype).view(tensor.shape))
        # 3. The values.
        if processes.is_main:
            for target, tensor in zip(shared, tensors, strict=True):
                target.copy_(tensor.detach())
        processes.barrier("shared memory")
    finally:
        if handle is not None:
            _close(handle, path)
    return shared


def _create(size: int) -> tuple[int, str]:
    """Create memory that other processes can open, and return its handle and path."""
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        handle = os.memfd_create("equipoise")
        path = f"/proc/{os.getpid()}/fd/{handle}"
    else:
        handle, path = tempfile.mkstemp(prefix="equipoise-")
    os.truncate(handle, size)
    return handle, path


def _close(handle: int, path: str) -> None:
    """Close the way to the memory, which lasts as long as a process uses it."""
    os.close(handle)
    if not path.startswith("/proc/"):
        os.unlink(path)


Undo = Callable[[], None]


def share_parameters(parameters: Sequence[Tensor], processes: Processes) -> Undo:
    """Put parameters into shared memory, with the values of the main process.

    Args:
        parameters: The parameters, the same in all processes.
        processes: The processes.

    Returns:
        A function that gives them memory of their own again.
    """
    for parameter, shared in zip(parameters, shared_like(parameters, processes), strict=True):
        _set_data(parameter, shared)

    def undo() -> None:
        for parameter in parameters:
            _set_data(parameter, parameter.detach().clone())

    return undo


def _set_data(tensor: Tensor, values: Tensor) -> None:
    """Let a tensor, which stays the same object, have the memory of another one."""
    tensor.data = values
