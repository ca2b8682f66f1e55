"""The stack between whose layers a network is cut is the largest one."""

from collections import OrderedDict

from torch import nn

from equipoise.extensions.pipeline.stack.layer_stack import largest_stack


class Encoder(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))


def test_the_stack_with_the_most_parameters() -> None:
    network = nn.ModuleDict({"small": Encoder(6, 2), "large": Encoder(2, 8)})
    stack = largest_stack(network)
    assert stack is not None
    assert list(stack) == ["large.layers.0", "large.layers.1"]
    assert list(stack.values()) == list(network["large"].layers)


def test_the_network_itself() -> None:
    stack = largest_stack(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)))
    assert stack is not None
    assert list(stack) == ["0", "1", "2"]


def test_layers_with_names() -> None:
    stack = largest_stack(nn.Sequential(OrderedDict(first=nn.Linear(2, 2), second=nn.Linear(2, 2))))
    assert stack is not None
    assert list(stack) == ["first", "second"]


def test_layers_of_several_classes_are_no_stack() -> None:
    assert largest_stack(nn.Sequential(nn.Linear(2, 2), nn.Bilinear(2, 2, 2))) is None


def test_one_layer_several_times_is_no_stack() -> None:
    layer = nn.Linear(2, 2)
    assert largest_stack(nn.ModuleList([layer, layer, layer])) is None


def test_layers_without_parameters_are_no_stack() -> None:
    assert largest_stack(nn.Sequential(nn.ReLU(), nn.ReLU())) is None
    assert largest_stack(nn.Sequential(nn.Linear(2, 2))) is None
    assert largest_stack(nn.Linear(2, 2)) is None
