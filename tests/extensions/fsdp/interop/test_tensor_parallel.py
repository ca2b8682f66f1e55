"""Layers forget that they were cut: they can be called with whole tensors, and cut again."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, parallelize_module

from equipoise.extensions.fsdp.interop.tensor_parallel import forget_cuts, wait_as_default
from tests.extensions.fsdp.programs import group

__all__ = ["group"]

# Torch's types lack the levels.
C10D: Any = dist


@pytest.mark.usefixtures("group")
def test_layers_forget_that_they_were_cut() -> None:
    network = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    calls = []
    network[0].register_forward_hook(lambda *call: calls.append(call))
    whole = dict(network.named_parameters())
    mesh = init_device_mesh("cpu", (1,))
    prepare = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    for _ in range(2):
        parallelize_module(network, mesh, {"0": ColwiseParallel(), "1": prepare})
        assert isinstance(network[0].weight, DTensor)
        forget_cuts(network)
        network[0].weight, network[0].bias = whole["0.weight"], whole["0.bias"]
        assert type(network(torch.ones(4, 2))) is torch.Tensor
    # Hooks of the user's stay.
    assert len(calls) == 2


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("level", [C10D.DebugLevel.OFF, C10D.DebugLevel.DETAIL])
def test_the_groups_of_a_mesh_wait_as_long_as_the_default_group(level: Any) -> None:
    """Also where torch compares the operations of processes, for which it wraps the groups."""

    def timeout(group: Any) -> timedelta:
        waits: timedelta = group._get_backend(torch.device("cpu")).options._timeout
        return waits

    default: Any = dist.group.WORLD
    usual_level = C10D.get_debug_level()
    C10D.set_debug_level(level)
    try:
        own = dist.new_group([0], timeout=timedelta(hours=5))
    finally:
        C10D.set_debug_level(usual_level)
    assert timeout(own) != timeout(default)
    try:
        own.set_timeout(timeout(own))
        is_accepted = True
    except RuntimeError:
        is_accepted = False
    # Torch 2.11 refuses it for wrapped groups.
    assert is_accepted or level is C10D.DebugLevel.DETAIL
    mesh = DeviceMesh.from_group(own, "cpu")
    assert wait_as_default(mesh) is mesh
    assert timeout(own) == (timeout(default) if is_accepted else timedelta(hours=5))
