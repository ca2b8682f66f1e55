"""The private names of torch's `fully_shard` are there and do what is relied upon."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from equipoise import ConfigurationError
from equipoise.interop.distributed import fully_sharded
from equipoise.interop.distributed.fully_sharded import begin_as_root, unshard_by_hand, unsharded_parameters
from equipoise.interop.distributed.whole_weights import whole_weights
from tests.support.process_groups import group

__all__ = ["group"]


def shard_and_undo() -> dict[str, bool]:
    """Shard a module, use it, and undo that; called in a process of its own, in a group of one."""
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 1))
    originals = dict(net.named_parameters(remove_duplicate=False))
    mesh = init_device_mesh("cpu", (1,))
    units: list[nn.Module] = [net[0], net]
    for unit in units:
        fully_shard(unit, mesh=mesh)
    begin_as_root(net)
    seen = {"a part can be called before the root": tuple(net[0](torch.ones(1, 2)).shape) == (1, 2)}
    net(torch.ones(1, 2)).sum().backward()
    seen["whole parameters are leaves"] = all(p.is_leaf for unit in units for p in unsharded_parameters(unit))
    seen["they are no shards"] = not any(isinstance(p, DTensor) for p in unsharded_parameters(net))
    seen["all are found"] = sum(p.numel() for unit in units for p in unsharded_parameters(unit)) == 9
    unshard_by_hand(units, originals, net)
    seen["classes are back"] = not any(isinstance(part, FSDPModule) for part in net.modules())
    seen["parameters are back"] = all(p is originals[name] for name, p in net.named_parameters())
    seen["it can be sharded again"] = isinstance(fully_shard(net, mesh=mesh), FSDPModule)
    return seen


@pytest.mark.usefixtures("group")
def test_private_names_of_fully_shard_do_what_is_relied_upon() -> None:
    seen = shard_and_undo()
    assert all(seen.values()), seen


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
def test_the_check_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    fully_sharded.check_names(init_device_mesh("cpu", (1,)))
    assert torch.equal(torch.get_rng_state(), before)


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
