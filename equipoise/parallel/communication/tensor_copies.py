"""Copies of the first process's tensors in all processes of torch's default group."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from equipoise.errors import StepError
from equipoise.parallel.communication.process_group import host_group

__all__ = ["copy_from_first", "dense_members", "give_memory"]


def copy_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Copy the values of the first process of a group to the others.

    Args:
        tensors: Parameters or buffers, the same in all processes.
        group: The processes. Default: all.

    Raises:
        StepError: If a sparse tensor has another number of entries than in rank 0.
    """
    with torch.no_grad():
        for tensor in tensors:
            if tensor.layout is torch.strided:
                _copy(tensor, group)
            else:
                _copy_sparse(tensor, group)


def _copy_sparse(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    source = tensor
    if source.layout is torch.sparse_coo:
        source = source.coalesce()
    members = dense_members(source)
    length = torch.tensor(len(members[-1]), device=tensor.device)
    own_length = int(length)
    _copy(length, group)
    if int(length) != own_length:
        raise StepError(
            f"A sparse tensor of shape {list(tensor.shape)} has {own_length} entries in one process and {int(length)}"
            " in the first one, but all receive the values of the first. Give it as many entries everywhere."
        )
    for member in members:
        _copy(member, group)
    if source is not tensor:
        tensor.copy_(source)


def _copy(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    # The default group may exchange tensors on devices alone.
    if group is None and tensor.device.type == "cpu":
        group = host_group()
    # A broadcast needs contiguous memory; where that is a copy, the values are copied back.
    contiguous = tensor.detach().contiguous()
    dist.broadcast(contiguous, group=group, group_src=0)
    if contiguous.data_ptr() != tensor.data_ptr():
        tensor.copy_(contiguous)


def give_memory(tensor: Tensor, values: Tensor) -> None:
    """Give values to a tensor on the meta device, without a new object: others may refer to it.

    Args:
        tensor: The tensor.
        values: Its values, in memory of their own.
    """
    if isinstance(tensor, nn.Parameter):
        values = nn.Parameter(values, requires_grad=tensor.requires_grad)
    vars(values).update(vars(tensor))
    torch.utils.swap_tensors(tensor, values)  # type: ignore[no-untyped-call]


def dense_members(tensor: Tensor) -> Sequence[Tensor]:
    """Return the dense tensors of which a tensor consists: itself; or indices and, last, the values of a sparse one.

    Args:
        tensor: The tensor; one in coordinates is coalesced.
    """
    if tensor.layout is torch.sparse_coo:
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [
            tensor.crow_indices(),
            tensor.col_indices(),
            tensor.values(),
        ]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [
            tensor.ccol_indices(),
            tensor.row_indices(),
            tensor.values(),
        ]
    return [tensor]
