"""The memory of tensors in messages: their values as bytes, and tensors of the same layout for the receiver.

A kernel may take another way for another layout, so that its rounding differs. In torch 2.13 the backward of
BatchNorm2d on the CPU is even wrong for a single sample whose gradient has certain strides. So a tensor arrives as it
was sent, if it fills its memory without gaps.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["TensorKind", "bytes_of", "kind_of", "size_of", "split_body", "tensor_of"]

# Dtype, shape, `requires_grad`, and the strides; None for those of a contiguous tensor. Plain tuples, which are pickled
# in every message.
TensorKind = tuple[torch.dtype, tuple[int, ...], bool, tuple[int, ...] | None]


def kind_of(tensor: Tensor) -> TensorKind:
    """Return the properties of a tensor that its receiver needs."""
    shape = tuple(tensor.shape)
    strides = None
    if not tensor.is_contiguous() and _in_order_of_memory(tensor).is_contiguous():
        strides = tensor.stride()
    return tensor.dtype, shape, tensor.requires_grad, strides


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the values of a tensor as bytes in the host's memory, in the order of the tensor's memory."""
    values = tensor.detach().cpu().resolve_conj().resolve_neg()
    if not values.is_contiguous():
        in_order = _in_order_of_memory(values)
        if in_order.is_contiguous():
            values = in_order
        else:
            # The memory has gaps.
            values = values.contiguous()
    return values.reshape(-1).view(torch.uint8)


def size_of(kind: TensorKind) -> int:
    """Return the number of bytes of a tensor."""
    dtype, shape, _, _ = kind
    return dtype.itemsize * math.prod(shape)


def split_body(body: Tensor, kinds: Sequence[TensorKind]) -> Iterator[Tensor]:
    """Yield the tensors of a message, each in memory of its own, because of alignment.

    Args:
        body: Their bytes, one after the other.
        kinds: The tensors.
    """
    begin = 0
    for kind in kinds:
        end = begin + size_of(kind)
        yield tensor_of(body[begin:end].clone(), kind)
        begin = end


def tensor_of(memory: Tensor, kind: TensorKind) -> Tensor:
    """Return the tensor whose values are in memory.

    Args:
        memory: The bytes.
        kind: The tensor.
    """
    dtype, shape, requires_grad, strides = kind
    values = memory.view(dtype)
    if strides is None:
        tensor = values.view(shape)
    else:
        tensor = values.as_strided(shape, strides)
    return tensor.requires_grad_(requires_grad)


def _in_order_of_memory(tensor: Tensor) -> Tensor:
    """Return a view whose dimensions are in the order in which the memory has them."""

    def step_and_size(dim: int) -> tuple[int, int]:
        return tensor.stride(dim), tensor.shape[dim]

    dims = range(tensor.ndim)
    outermost_first = sorted(dims, key=step_and_size, reverse=True)
    return tensor.permute(outermost_first)
