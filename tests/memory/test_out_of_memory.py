"""Errors of allocators, as they really read, and what is taken from them."""

from typing import Any

import pytest
import torch
from torch.distributed import DistBackendError

from equipoise import ConfigurationError, OutOfMemoryEvent, Split, StepError
from equipoise.memory.out_of_memory import allocated_bytes, device_of, free_bytes, is_out_of_memory, requested_bytes

GIB, MIB = 2**30, 2**20
CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 1 has a total capacity of 15.77 GiB of which 1.50 GiB is"
    " free. Process 7 has 14.27 GiB memory in use. Of the allocated memory 12.00 GiB is allocated by PyTorch, and"
    " 1.25 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting"
    " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
SMALL = (
    "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 139.72 GiB of which 512.00 KiB is"
    " free. Including non-PyTorch memory, this process has 139.71 GiB memory in use. 300.00 MiB allowed; Of the"
    " allocated memory 295.50 MiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    " 240000000 bytes. Error code 12 (Cannot allocate memory)"
)
WINDOWS = (
    "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes."
)
MPS = (
    "MPS backend out of memory (MPS allocated: 17.00 GB, other allocations: 1.05 GB, max allowed: 18.13 GB). Tried to"
    " allocate 256 bytes on private pool."
)


@pytest.mark.parametrize(
    ("error", "requested", "free", "allocated", "device"),
    [
        (torch.OutOfMemoryError(CUDA), 20 * GIB, 3 * GIB // 2, 12 * GIB, "cuda:1"),
        (torch.OutOfMemoryError(SMALL), 2 * MIB, 512 * 1024, int(295.5 * MIB), "cuda:0"),
        (RuntimeError(CPU), 240_000_000, None, None, None),
        (RuntimeError(WINDOWS), 4096, None, None, None),
        (RuntimeError(MPS), 256, None, None, None),
        (MemoryError(), None, None, None, None),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), *[None] * 4),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            *[None] * 4,
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), *[None] * 4),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if ..."), *[None] * 4),
        (RuntimeError("GET was unable to find an engine to execute this computation"), *[None] * 4),
        (
            RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
            *[None] * 4,
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_out_of_memory_is_understood(error: Exception, requested: Any, free: Any, allocated: Any, device: Any) -> None:
    message = str(error)
    assert is_out_of_memory(error)
    assert requested_bytes(message) == requested
    assert free_bytes(message) == free
    assert allocated_bytes(message) == allocated
    assert device_of(message) == device


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
        ValueError("out of memory"),
        StepError("A batch ran out of memory, and we say what would help."),
        DistBackendError("NCCL error in ProcessGroupNCCL.cpp: Cuda failure 2 'out of memory'"),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_are_not_out_of_memory(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_the_message_of_the_installed_allocator_is_understood() -> None:
    """The message of this torch, not one that was written down."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert requested_bytes(str(caught.value)) == 2**50


def event(**changes: Any) -> OutOfMemoryEvent:
    given: dict[str, Any] = {
        "phase": "backward", "device": "cuda:1", "batch_idx": 3, "batch_size": 8, "parts": 1, "most_parts": 8,
        "obstacle": "", "requested": None, "free": None, "message": "", "step": 3, "seconds": 0.0,
    }  # fmt: skip
    return OutOfMemoryEvent(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "Batch 3 of 8 samples ran out of memory on cuda:1 in backward."),
        ({"batch_size": None, "phase": "optimizer step"}, "Batch 3 ran out of memory on cuda:1 in optimizer step."),
        ({"parts": 4}, "Batch 3 of 8 samples, computed in 4 parts, ran out of memory on cuda:1 in backward."),
        ({"global_rank": 2}, "Batch 3 of 8 samples ran out of memory on cuda:1 of rank 2 in backward."),
    ],
)
def test_an_event_in_a_sentence(changes: Any, sentence: str) -> None:
    assert str(event(**changes)) == sentence


@pytest.mark.parametrize("parts", [-1, True, 2.0])
def test_wrong_numbers_of_parts_are_refused(parts: Any) -> None:
    with pytest.raises(ConfigurationError, match="of a Split must be an integer of at least 0, not"):
        Split(parts)
    with pytest.raises(ConfigurationError, match="grow_after of a Split"):
        Split(2, parts)
