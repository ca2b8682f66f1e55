"""The private names of torch's `fully_shard` are there and do what is relied upon."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from equipoise import ConfigurationError
from equipoise.interop.distributed import fully_sharded
from equipoise.interop.distributed.whole_weights import whole_weights
from tests.support.process_groups import group

__all__ = ["group"]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("kind", "owner"), [("_OF_STATE", "FSDPState"), ("_OF_GROUP", "FSDPParamGroup"), ("_OF_PARAMETER", "FSDPParam")]
)
def test_a_missing_name_is_refused_before_anything_is_sharded(
    kind: str, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = init_device_mesh("cpu", (1,))
    fully_sharded.check_names(mesh)
    monkeypatch.setattr(fully_sharded, kind, ("_gone",))
    with pytest.raises(ConfigurationError, match=rf"^strategy='fsdp' does not work with torch .* {owner}\._gone\."):
        fully_sharded.check_names(mesh)


@pytest.mark.usefixtures("group")
def test_whole_weights_are_found_once_they_were_gathered() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    assert whole_weights(net) is None
    mesh = init_device_mesh("cpu", (1,))
    for unit in (net[0], net):
        fully_shard(unit, mesh=mesh)
    assert whole_weights(net) == []

    net(torch.ones(1, 2)).sum()
    weights = whole_weights(net)
    assert weights is not None
    assert [tuple(weight.shape) for weight in weights] == [(1, 3), (1,), (3, 2), (3,)]
