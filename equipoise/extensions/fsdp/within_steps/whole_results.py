"""Functions of torch on tensors in shards, computed on whole ones where shards would not do."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from equipoise.errors import StepError
from equipoise.extensions.fsdp.mesh.grid import TENSOR, part_of
from equipoise.extensions.fsdp.state.gathering import gather_whole
from equipoise.extensions.fsdp.within_steps.in_place import IN_PLACE, override
from equipoise.interop.torch.autograd import version_of
from equipoise.interop.torch.dispatch import change_class, own_functions
from equipoise.parallel.batches.shares import even_chunks
from equipoise.parallel.communication.object_exchange import exchange_number
from equipoise.tree import map_leaves, tensors_in

__all__ = ["Mean", "compute_whole", "gathered", "is_alike", "part_like", "read_together", "sum_gradient"]

# Returns the mean over the processes of a gradient and its parameter.
Mean = Callable[[Tensor, Any], Tensor]


def gathered(value: Any) -> Any:
    """Return arguments in which each tensor in shards is whole; called in all processes."""
    return map_leaves(lambda leaf: gather_whole(leaf) if isinstance(leaf, DTensor) else leaf, value)


def read_together(group: dist.ProcessGroup) -> Callable[[DTensor], Tensor]:
    """Return what gathers a tensor in shards of which a number is read, once all processes read it.

    Args:
        group: A group of all processes, in which nothing else is exchanged.
    """

    def whole(tensor: DTensor) -> Tensor:
        try:
            # Otherwise what this process alone exchanges would meet other exchanges, whose values it would change.
            dist.barrier(group)
        except RuntimeError as error:
            raise StepError(
                "A number of a weight or a gradient is read, as by `float`, `.item()` or `if`, which other processes"
                " have not done within the timeout of strategy='fsdp'. Read it in all processes, and let one of them"
                " print or store it."
            ) from error
        return gather_whole(tensor)

    return whole


def part_like(shard: Any, tensor: Tensor) -> Tensor:
    """Return the part of a whole tensor that this process has of a tensor in shards, as a view.

    Args:
        shard: The tensor in shards.
        tensor: A tensor of its shape. A part of a cut layer's, where the tensor in shards is a part of such a part.
    """
    part = part_of(tensor)
    mesh = shard.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    for number, placement in enumerate(shard.placements):
        is_cut_already = isinstance(tensor, DTensor) and names[number] == TENSOR
        if placement.is_replicate() or is_cut_already:
            continue
        # Parts are those of `torch.chunk`, of which the last ones may be empty.
        sizes = even_chunks(part.shape[placement.dim], mesh.size(number))
        rank = mesh.get_local_rank(number)
        part = part.narrow(placement.dim, sum(sizes[:rank]), sizes[rank])
    return part.detach()


def sum_gradient(gradient: Tensor, shard: Any) -> Tensor:
    """Return the sum over all processes of a whole gradient of a parameter in shards."""
    total = gradient.detach().clone(memory_format=torch.contiguous_format)
    for dimension in range(shard.device_mesh.ndim):
        dist.all_reduce(total, group=shard.device_mesh.get_group(dimension))
    return total


def is_alike(tensor: Tensor, shard: Any) -> bool:
    """Return whether all processes with a part of a shard have the same whole tensor; called in all of them."""
    tensor = tensor.detach()
    if not tensor.is_floating_point() and not tensor.is_complex():
        tensor = tensor.double()
    mean = sum_gradient(tensor, shard) / shard.device_mesh.size()
    tolerance = 16 * torch.finfo(tensor.dtype).eps
    size = float(tensor.nan_to_num(0, 0, 0).norm())
    is_same = torch.allclose(mean, tensor, rtol=tolerance, atol=tolerance * size, equal_nan=True)
    return all(exchange_number(int(is_same)))


class _Gather(torch.autograd.Function):
    """Gathers a parameter, whose gradient is averaged over the processes."""

    @staticmethod
    def forward(context: Any, shard: Any, mean: Mean) -> Tensor:
        context.arguments = (shard, mean)
        return gather_whole(shard)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: Tensor) -> Any:
        shard, mean = context.arguments
        value = torch.zeros_like(shard.detach())
        part_of(value).copy_(part_like(value, mean(gradient, shard)))
        return value, None


def compute_whole(function: Callable[..., Any], args: Any, kwargs: Any, mean: Mean) -> Any:
    """Return the result of a function on whole tensors, and write to the shards what it changes in them.

    Args:
        function: The function.
        args: Its arguments.
        kwargs: Its arguments by name.
        mean: Returns the mean over the processes of a whole gradient of a parameter in shards.

    Raises:
        StepError: If whole arguments that differ between the processes change a tensor in shards.
    """
    # 1. Each tensor in shards as a whole, of a memory of its own.
    copies: dict[int, tuple[Any, Tensor, Any]] = {}

    def whole_of(leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        if id(leaf) not in copies:
            has_graph = torch.is_grad_enabled() and leaf.requires_grad
            if has_graph:
                tensor = _Gather.apply(leaf, mean)  # type: ignore[no-untyped-call]
            else:
                tensor = gather_whole(leaf)
            copies[id(leaf)] = (leaf, tensor, version_of(tensor))
        return copies[id(leaf)][1]

    result = function(*map_leaves(whole_of, args), **map_leaves(whole_of, kwargs))

    # 2. What has changed. The result of an operation in place is the tensor itself.
    shards = {}
    has_wholes = any(leaf.ndim and not isinstance(leaf, DTensor) for leaf in tensors_in((args, kwargs)))
    for shard, tensor, version in copies.values():
        if version_of(tensor) != version:
            if has_wholes and not is_alike(tensor, shard):
                raise StepError(
                    "The processes change a weight or a gradient under strategy='fsdp' by different values, of which"
                    " each would keep a part. Average them over the processes by `self.all_gather` first."
                )
            with torch.no_grad():
                part_of(shard).copy_(part_like(shard, tensor))
            shards[id(tensor)] = shard

    # 3. Views of these wholes would change nothing else.
    memories = {tensor.untyped_storage().data_ptr() for _, tensor, _ in copies.values()}

    def result_of(leaf: Any) -> Any:
        if id(leaf) in shards:
            return shards[id(leaf)]
        if isinstance(leaf, Tensor) and type(leaf) is Tensor and leaf.untyped_storage().data_ptr() in memories:
            change_class(leaf, _Copy)
        return leaf

    return map_leaves(result_of, result)


def _refused(name: str, inherited: Any) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise StepError(
            "Under strategy='fsdp' the weights are in shards here, and a view of one is a copy, so what is changed in"
            " it would be lost. Change the weight or the gradient itself, as by `weight[0] = 0` or `weight.mul_(mask)`."
        )

    return refuse


@override(IN_PLACE, _refused)
class _Copy(Tensor):
    """A copy of what is a view on one device. It is only read."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What is computed with it is no such copy.
        with own_functions():
            return function(*args, **kwargs or {})
