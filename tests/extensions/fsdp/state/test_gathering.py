"""Whole tensors from shards: equal to those of `DTensor.full_tensor()`, to the bit."""

import random
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from equipoise.extensions.fsdp.state.gathering import gather_whole
from equipoise.extensions.fsdp.state.loaded_shards import shard_like
from tests.extensions.fsdp.programs import in_processes

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
TENSORS = 25


def random_tensors(draw: random.Random, mesh: DeviceMesh) -> Iterator[DTensor]:
    """Yield tensors of random types and shapes, also empty ones, cut in random ways."""
    for _ in range(TENSORS):
        shape = [draw.randint(0, 7) for _ in range(draw.randint(1, 3))]
        value = torch.randint(0, 100, shape).to(draw.choice(DTYPES))
        placements = [draw.choice([Replicate(), Shard(draw.randrange(len(shape)))]) for _ in range(mesh.ndim)]
        yield distribute_tensor(value, mesh, placements)


def parameters_of_shards(mesh: DeviceMesh) -> Iterator[DTensor]:
    """Yield parts of parts: layers that are cut over a row and sharded over a column."""
    net = nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 7))
    parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(net, mesh=mesh["data"])
    yield from net.parameters()  # type: ignore[misc]


def sums(mesh: DeviceMesh) -> Iterator[DTensor]:
    """Yield tensors of which each process has a summand."""
    yield DTensor.from_local(torch.ones(3), mesh, [Replicate(), Partial()])
    yield DTensor.from_local(torch.ones(3), mesh, [Shard(0), Partial()])


def compare(seed: int, rows: int, columns: int) -> int:
    """Compare tensors in each process; return their number."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (rows, columns), mesh_dim_names=("data", "tensor"))
    tensors = [*random_tensors(random.Random(seed), mesh), *parameters_of_shards(mesh), *sums(mesh)]
    for tensor in tensors:
        gathered = gather_whole(tensor)
        expected = tensor.detach().full_tensor()  # type: ignore[attr-defined]
        assert type(gathered) is torch.Tensor
        assert gathered.dtype == expected.dtype
        assert torch.equal(gathered, expected), (tensor.placements, tensor.shape)
        if not any(placement.is_partial() for placement in tensor.placements):
            assert torch.equal(shard_like(tensor, gathered).to_local(), tensor.to_local())
            # An optimiser may have numbers beside tensors.
            assert shard_like(tensor, 3) == 3
    return len(tensors)


@pytest.mark.thorough
@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (3, 1), pytest.param(2, 3, marks=pytest.mark.slow)])
def test_whole_tensors_are_those_of_torchs_full_tensor(rows: int, columns: int) -> None:
    """Cut again, they are the shards."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    assert in_processes(rows * columns, partial(compare, seed, rows, columns)) == TENSORS + 6
