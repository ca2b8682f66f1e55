"""The memory of tensors in messages: their values as bytes, and tensors of the same layout for the receiver.

A kernel may take another way for another layout, so that its rounding differs. In torch 2.13 the backward of
BatchNorm2d on the CPU is even wrong for a single sample whose gradient has certain strides. So a tensor arrives as it
was sent, if it fills its memory without gaps.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from equipoise.errors import StepError

__all__ = ["TensorKind", "as_sent", "bytes_of", "kind_of", "size_of", "split_body", "tensor_of"]

# Dtype, shape, `requires_grad`, the strides, None for those of a contiguous tensor, and of a sparse one the number of
# entries and of dimensions that their indices have. Plain tuples, which are pickled in every message.
TensorKind = tuple[torch.dtype, tuple[int, ...], bool, tuple[int, ...] | None, tuple[int, int] | None]


def as_sent(tensor: Tensor) -> Tensor:
    """Return a tensor in the form in which it is sent: a sparse one has each entry once."""
    return tensor.coalesce() if tensor.is_sparse else tensor


def kind_of(tensor: Tensor) -> TensorKind:
    """Return the properties of a tensor that its receiver needs.

    Args:
        tensor: The tensor as it is sent.

    Raises:
        StepError: If it is neither dense nor of the layout that gradients of embeddings have.
    """
    shape = tuple(tensor.shape)
    strides = None
    if tensor.layout is torch.sparse_coo:
        entries = (tensor.indices().size(1), tensor.sparse_dim())
        return tensor.dtype, shape, tensor.requires_grad, None, entries
    if tensor.layout is not torch.strided:
        raise StepError(
            f"The processes of a pipeline exchange dense tensors and those of torch.sparse_coo, not of {tensor.layout}."
            " Convert it, or take PipelineStrategy(engine='threads')."
        )
    if not tensor.is_contiguous() and _in_order_of_memory(tensor).is_contiguous():
        strides = tensor.stride()
    return tensor.dtype, shape, tensor.requires_grad, strides, None


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the values of a tensor as bytes in the host's memory, in the order of the tensor's memory."""
    if tensor.layout is torch.sparse_coo:
        return torch.cat([bytes_of(tensor.indices()), bytes_of(tensor.values())])
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
    dtype, shape, _, _, entries = kind
    if entries is None:
        return dtype.itemsize * math.prod(shape)
    number, dims = entries
    return number * (dims * torch.int64.itemsize + dtype.itemsize * math.prod(shape[dims:]))


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
    dtype, shape, requires_grad, strides, entries = kind
    if entries is not None:
        number, dims = entries
        end = number * dims * torch.int64.itemsize
        indices = memory[:end].view(torch.int64).view(dims, number)
        # In memory of their own, because of alignment.
        values = memory[end:].clone().view(dtype).view(number, *shape[dims:])
        return torch.sparse_coo_tensor(indices, values, shape, requires_grad=requires_grad, is_coalesced=True)
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

    return tensor.permute(sorted(range(tensor.ndim), key=step_and_size, reverse=True))
