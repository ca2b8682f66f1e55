"""Which parts of a module are units, and arguments of the strategy that are refused."""

from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from equipoise import ConfigurationError, FSDPStrategy, Trainer
from equipoise.extensions.fsdp.units import choose_units, table_of
from tests.extensions.fsdp.modules import Tied
from tests.extensions.fsdp.programs import QUIET, Net
from tests.support.process_groups import group
from tests.support.trainer_runs import refuses

__all__ = ["group"]


def titles(*arguments: Any) -> list[str]:
    return [unit.title for unit in choose_units(*arguments)]


def test_patterns_name_parts_between_dots() -> None:
    """Inner units come first, as torch shards them from the inside out."""
    inner = ["blocks.2.norm", "blocks.1.down", "blocks.1.up", "blocks.1.norm", "blocks.0.norm"]
    expected = [*inner, "blocks.2", "blocks.1", "blocks.0", "(root)"]
    assert titles(Net(), ["blocks.*", "blocks.1.*", "**.norm"]) == expected


def test_classes_name_their_submodules() -> None:
    """The layer that attention reads without a call is none, and a class of which there is no submodule names none."""
    net = nn.Sequential(nn.MultiheadAttention(4, 1), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))
    assert titles(net, [nn.Linear, nn.Conv1d]) == ["1.0", "2", "(root)"]


def test_large_layers_are_units_unless_nobody_calls_them() -> None:
    net = nn.Sequential(nn.Embedding(2**18, 5, device="meta"), nn.Linear(5, 5), nn.Linear(5, 2**18, device="meta"))
    assert titles(net) == ["0", "2", "(root)"]
    # The last layer of torch's attention is large enough.
    assert titles(nn.Sequential(nn.MultiheadAttention(1100, 2, device="meta"))) == ["(root)"]


def test_tied_weights_stay_with_the_root() -> None:
    assert titles(Tied()) == ["blocks.0", "(root)"]
    with pytest.raises(ConfigurationError, match=r"blocks\.2\.up\.weight and blocks\.1\.up\.weight are the same"):
        choose_units(Tied(), ["blocks.0", "blocks.2"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"units": "blocks.*"}, "units must be 'auto' or a list"),
        ({"replicas": 0}, "replicas must be a whole number from 1, not 0"),
        ({"tensor": 0}, "tensor must be 'auto' or a whole number from 1, not 0"),
        ({"data": "all"}, "data must be 'auto'"),
        ({"context": 0}, "context must be a whole number from 1, not 0"),
        ({"context": "auto"}, "context must be a whole number from 1, not 'auto'"),
        ({"tensor": 2, "replicas": 2}, "tensor=2 and replicas=2 do not go together"),
        ({"tensor": "auto", "cpu_offload": True}, "tensor='auto' and cpu_offload=True"),
        ({"context": 2, "replicas": 2}, "context=2 and replicas=2 do not go together"),
        ({"context": 2, "cpu_offload": True}, "context=2 and cpu_offload=True"),
        ({"context": 2, "context_blocks": "network.blocks"}, "context_blocks must be a list of names"),
        ({"context": 2, "context_blocks": []}, "context_blocks must be a list of names"),
        ({"context_blocks": ["network.blocks"]}, "over `context` processes, but context=1"),
        ({"tensor": 2, "tensor_plan": ["up"]}, "must be a mapping of names to styles"),
        ({"tensor": 2, "tensor_plan": {"up": "column"}}, "has the entry 'up': 'column'. Styles are 'colwise', 'rowwi"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], words: str) -> None:
    refuses(lambda: FSDPStrategy(**options), words)


@pytest.mark.parametrize(
    ("options", "processes", "words"),
    [
        ({"replicas": 2}, 3, "replicas=2 do not divide 3 processes"),
        ({"cpu_offload": True}, 2, "cpu_offload=True moves shards from GPUs"),
        ({"context": 3}, 4, "times context=3 is not the number of processes, 4"),
        ({"context": 2, "tensor": 2}, 2, "tensor=2 times context=2 is not the number of processes, 2"),
    ],
)
def test_arguments_are_compared_with_the_devices(options: dict[str, Any], processes: int, words: str) -> None:
    refuses(lambda: Trainer(strategy=FSDPStrategy(**options), devices=["cpu"] * processes, **QUIET), words)


def test_lightnings_default_of_cpu_offload_goes_with_a_mesh() -> None:
    assert not FSDPStrategy(tensor=2, context=2, cpu_offload=None).cpu_offload


@pytest.mark.parametrize(
    ("name", "words"),
    [("layers.*", "units='layers.*' matches no submodule"), ("blocks", "a unit needs parameters and a forward")],
)
def test_names_of_units_are_checked(name: str, words: str) -> None:
    refuses(lambda: choose_units(Net(), [name]), words)


@pytest.mark.usefixtures("group")
def test_a_table_shows_the_units() -> None:
    """A unit that `configure_model` has sharded is divided already."""
    net = Net()
    fully_shard(net.blocks[0], mesh=init_device_mesh("cpu", (1,)))
    lines = [line.split() for line in table_of(choose_units(net, ["blocks.*"]), 2).splitlines()]
    assert lines[1:] == [
        ["blocks.2", "Block", "231", "924", "B", "462", "B"],
        ["blocks.1", "Block", "231", "924", "B", "462", "B"],
        ["blocks.0", "FSDPBlock", "231", "924", "B", "924", "B"],
        ["(root)", "Net", "71", "284", "B", "142", "B"],
    ]
