"""Layers forget that they were cut, and groups of a mesh wait as long as all others."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from equipoise.extensions.fsdp.interop.tensor_parallel import forget_cuts, wait_as_default
from tests.support.process_groups import group

__all__ = ["group"]

# Torch's types lack the levels.
C10D: Any = dist


@pytest.mark.usefixtures("group")
def test_layers_forget_that_they_were_cut() -> None:
    """They can be called with whole tensors, and cut again. Hooks of the user's stay."""
    network, calls = nn.Sequential(nn.Linear(2, 3)), []
    network[0].register_forward_hook(lambda *call: calls.append(call))
    whole = dict(network[0].named_parameters())
    for _ in range(2):
        parallelize_module(network, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
        assert isinstance(network[0].weight, DTensor)
        forget_cuts(network)
        network[0].weight, network[0].bias = whole["weight"], whole["bias"]
        assert type(network(torch.ones(4, 2))) is torch.Tensor
    assert len(calls) == 2


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("level", [C10D.DebugLevel.OFF, C10D.DebugLevel.DETAIL])
def test_the_groups_of_a_mesh_wait_as_long_as_the_default_group(level: Any) -> None:
    """Or as long as they did, where torch compares the operations of processes and refuses it for such a group."""

    def timeout(group: Any) -> timedelta:
        waits: timedelta = group._get_backend(torch.device("cpu")).options._timeout
        return waits

    usual_level = C10D.get_debug_level()
    C10D.set_debug_level(level)
    try:
        default, own = dist.group.WORLD, dist.new_group([0], timeout=timedelta(hours=5))
    finally:
        C10D.set_debug_level(usual_level)
    assert timeout(own) != timeout(default)
    mesh = DeviceMesh.from_group(own, "cpu")
    assert wait_as_default(mesh) is mesh
    assert timeout(own) == timeout(default) or level is C10D.DebugLevel.DETAIL
