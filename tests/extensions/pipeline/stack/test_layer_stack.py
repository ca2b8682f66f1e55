"""The stack between whose layers a network is cut is the largest one."""

from collections import OrderedDict

import pytest
from torch import nn

from equipoise.extensions.pipeline.stack.layer_stack import largest_stack


def linears(count: int, width: int) -> list[nn.Linear]:
    return [nn.Linear(width, width) for _ in range(count)]


@pytest.mark.parametrize(
    ("network", "names"),
    [
        (
            nn.ModuleDict({"small": nn.ModuleList(linears(6, 2)), "large": nn.ModuleList(linears(2, 8))}),
            ["large.0", "large.1"],
        ),
        (nn.Sequential(*linears(3, 2)), ["0", "1", "2"]),
        (nn.Sequential(OrderedDict(zip(("first", "second"), linears(2, 2), strict=True))), ["first", "second"]),
    ],
    ids=["most parameters", "the network itself", "names"],
)
def test_the_largest_stack_of_equal_layers(network: nn.Module, names: list[str]) -> None:
    stack = largest_stack(network)
    assert stack is not None
    assert stack == {name: network.get_submodule(name) for name in names}
    assert list(stack) == names


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Linear(2, 2), nn.Bilinear(2, 2, 2)),
        nn.ModuleList(linears(1, 2) * 3),
        nn.Sequential(nn.ReLU(), nn.ReLU()),
        nn.Sequential(nn.Linear(2, 2)),
        nn.Linear(2, 2),
    ],
    ids=["several classes", "one layer several times", "no parameters", "one layer", "no container"],
)
def test_other_networks_have_no_stack(network: nn.Module) -> None:
    assert largest_stack(network) is None
