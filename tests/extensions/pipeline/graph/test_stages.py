"""A traced forward in stages: what passes, where one may cut, and that all stages together are the forward."""

import enum
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise import StepError
from equipoise.extensions.pipeline.graph.stages import (
    check_exchanged,
    ends_by_placement,
    map_tensors,
    map_values,
    may_cut,
)
from tests.support.networks.layers import network as written
from tests.support.traces import traced

Pair = namedtuple("Pair", "one other")


def test_one_may_not_cut_before_what_is_changed_in_place_nor_before_its_views():
    def in_place(self: Any, x: Tensor) -> Tensor:
        hidden = self.relu(self.a(x))
        seen = self.flat(self.b(hidden)).view(-1, 2, 2).swapdims(0, 1)
        seen += 1
        return nn.functional.relu(seen.transpose(1, 2), inplace=True)

    inner = {"relu": nn.ReLU(inplace=True), "flat": nn.Flatten()}
    network = written(in_place, a=nn.Linear(4, 4), b=nn.Linear(4, 4), **inner)
    made = traced(network, torch.rand(2, 4))
    allowed = [node.name for node, may in zip(made.calls, may_cut(made), strict=True) if may]
    assert allowed == ["network_relu", "relu"]


class Settings:
    """An object that a function may take, and no stage hands on."""

    factor = 2.0


class Scale(torch.autograd.Function):
    """Multiplies by a setting."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, settings: Settings) -> Tensor:
        return features * settings.factor


def test_one_may_not_cut_between_a_setting_and_its_use():
    def scales(self: Any, x: Tensor) -> Tensor:
        return self.b(Scale.apply(self.a(x), self.settings))

    network = written(scales, a=nn.Linear(4, 4), b=nn.Linear(4, 4), settings=Settings())
    made = traced(network, torch.rand(2, 4))
    assert any(node.name.startswith("constant") for node in made.calls)
    allowed = [node.name for node, may in zip(made.calls, may_cut(made), strict=True) if may]
    assert [name for name in allowed if not name.startswith("constant")] == allowed
    assert "network_a" in allowed


def test_another_trace_is_cut_where_the_parts_lie():
    def forward(self: Any, x: Tensor, again: bool = False) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.layers[0](x) if again else x

    network = written(forward, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(4)))
    homes = {"layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 2}
    made = traced(network, torch.rand(2, 4))
    assert ends_by_placement(made, homes.get, 3) == [5, 7, 9]
    assert ends_by_placement(traced(network, torch.rand(2, 4), True), homes.get, 3) == [5, 7, 10]
    assert ends_by_placement(made, {**homes, "layers.3": 1}.get, 3) == [5, 9, 9]


class Colour(enum.Enum):
    RED = 1


def test_tensors_in_containers_are_mapped():
    value = (1, [torch.ones(1), {"a": None}], Pair(torch.ones(2), "x"), OrderedDict(b=torch.ones(3)), torch.Size([4]))
    sizes = map_tensors(len, value)
    assert sizes == (1, [1, {"a": None}], Pair(2, "x"), OrderedDict(b=3), torch.Size([4]))
    assert [type(item) for item in sizes] == [int, list, Pair, OrderedDict, torch.Size]
    seen: list[Any] = []
    map_values(seen.append, value)
    assert len(seen) == 7


def test_objects_that_stages_cannot_exchange_are_refused():
    plain = (torch.ones(1), 1, 2.0, True, 1j, "x", None, slice(1), torch.Size([1]), torch.device("cpu"), torch.float16)
    check_exchanged([plain, [Colour.RED], {"a": (..., range(2))}, Pair(1, 2)], "abcd")
    for wrong in (object(), [lambda: 1], {"a": {1, 2}}, nn.Linear(1, 1)):
        with pytest.raises(StepError, match="A stage of the pipeline hands on 'b', in which there is a"):
            check_exchanged([plain, wrong], "ab")
