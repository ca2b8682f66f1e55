"""Forwards as lists of calls: what can be followed, what stays whole, what stands in the way."""

import random
import re
import weakref
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from equipoise.extensions.pipeline.graph.call_structure import CallStructure
from equipoise.extensions.pipeline.recording.tracing import NotTraceable
from equipoise.interop.torch import modules
from tests.support.networks.layers import network as written
from tests.support.traces import called, run, traced


def asks(self: Any, x: Tensor) -> Tensor:
    hidden = self.layer(x)
    return hidden * 2 if hidden.sum() > 0 else hidden


def counts(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return self.layer(x)


def appends(self: Any, x: Tensor) -> Tensor:
    self.outputs.append(x.detach())
    return self.layer(x)


def draws(self: Any, x: Tensor) -> Tensor:
    return self.layer(x) * random.random() * float(np.random.rand()) * torch.rand(1)


def checkpoints(self: Any, x: Tensor) -> Tensor:
    return checkpoint(self.layer, x, use_reentrant=False)


def changes_a_buffer(self: Any, x: Tensor) -> Tensor:
    self.seen.mul_(0.5).add_(1.0)
    return self.layer(x)


def sets_a_buffer(self: Any, x: Tensor) -> Tensor:
    self.seen = 0.5 * self.seen + x.detach()
    return self.layer(x)


def without_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return self.layer(x)


def casts(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        hidden = self.layer(x)
    return hidden.float()


def one_layer(forward: Any) -> nn.Module:
    """A network of one layer with what the forwards here use."""
    network = written(forward, layer=nn.Linear(3, 3), calls=0, outputs=[])
    network.register_buffer("seen", torch.zeros(3))
    return network


STAY_WHOLE = {
    asks: r"asks, line \d+: `return hidden \* 2 if hidden.sum\(\) > 0 else hidden`",
    counts: "sets the attribute 'calls' of Network",
    appends: "changes the list 'outputs' of Network",
    draws: "draws random numbers|draws",
    # torch 2.11 asks whether a tensor has a graph before it sets its hooks.
    checkpoints: "(activation checkpointing|`grad_fn`)",
    changes_a_buffer: "changes the buffer 'seen' of Network",
    sets_a_buffer: "sets the buffer 'seen' of Network",
    without_gradients: r"line \d+: `return self.layer\(x\)` \(computed under torch.no_grad",
    casts: r"line \d+: `hidden = self.layer\(x\)` \(computed under torch.no_grad, torch.autocast",
}


@pytest.mark.parametrize("forward", STAY_WHOLE, ids=lambda forward: forward.__name__)
def test_submodules_that_cannot_be_recorded_stay_whole_and_the_reason_is_named(forward):
    """Also deep within containers; nothing of the attempt remains, and what is beside it is followed."""
    one, other, x = one_layer(forward), one_layer(forward), torch.rand(3)
    network = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), one, nn.Linear(3, 3)), other)
    seed = (random.getstate(), torch.get_rng_state(), np.random.get_state()[2])
    made = traced(network, x)
    assert called(made) == ["0", "1.0", "1.1", "1.2", "2"]
    assert set(made.opaque) == {"1.1", "2"}
    assert re.search(STAY_WHOLE[forward], made.opaque["1.1"])
    for part in (one, other):
        assert (part.calls, part.outputs, part.seen.tolist()) == (0, [], [0.0] * 3)
    after = (random.getstate(), torch.get_rng_state(), np.random.get_state()[2])
    assert seed[0] == after[0]
    assert torch.equal(seed[1], after[1])
    assert seed[2] == after[2]


def test_values_tell_that_a_buffer_is_changed_where_no_private_name_tells_it(monkeypatch):
    monkeypatch.setattr(modules, "_has_versions", False)
    made = traced(nn.Sequential(one_layer(changes_a_buffer), one_layer(counts)), torch.rand(3))
    assert [reason.rpartition(" of ")[0] for reason in made.opaque.values()] == [
        "changes the buffer 'seen'",
        "sets the attribute 'calls'",
    ]


# As text, since pytest makes something else of assertions in this file.
ASSERTING = """
class Asserting(nn.Module):
    def forward(self, x, most=5):
        size, length = x.shape
        assert length <= most, f"{length} is too long"
        assert size > 0 and length > 0
        assert (x >= 0).all()
        positions = torch.arange(length, device=x.device)
        return x + positions.to(x.dtype)
"""


def test_assertions_of_a_forward_hold_in_each_call():
    space = {"nn": nn, "torch": torch}
    exec(ASSERTING, space)  # noqa: S102
    network = space["Asserting"]()
    made = traced(network, torch.zeros(2, 3))
    assert torch.equal(run(made, torch.ones(2, 3)), torch.arange(3.0).expand(2, 3) + 1)
    with pytest.raises(AssertionError, match="does not hold"):
        run(made, torch.full((2, 3), -1.0))
    # Another length is another trace.
    assert not made.fits([torch.zeros(2, 4)])
    with pytest.raises(AssertionError, match="6 is too long"):
        traced(network, torch.zeros(2, 6))


def test_layers_with_hooks_stay_whole():
    seen = []
    network = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 3))
    network[0].register_forward_hook(lambda *_: seen.append(1))
    assert called(traced(network, torch.rand(2, 3))) == ["0", "1"]
    assert seen == [1]  # the forward runs once to be recorded


# The structure of a call


Pair = namedtuple("Pair", "one other")


@dataclass(frozen=True)
class Data:
    tensor: Tensor
    name: str


def test_tensors_are_taken_out_and_filled_in():
    tensors = [torch.rand(2) for _ in range(6)]
    a, b, c, d, e, f = tensors
    args = (a, [b, 3], {"c": c, "n": None}, Pair(d, 2.0), Data(e, "x"), UserDict(f=f), OrderedDict(), torch.Size([2]))
    structure = CallStructure(args, {"again": a})
    assert [id(one) for one in structure.tensors] == [id(one) for one in (*tensors, a)]
    filled, kwargs = structure.fill([0, 1, 2, 3, 4, 5, 6])
    assert filled[:4] == (0, [1, 3], {"c": 2, "n": None}, Pair(3, 2.0))
    assert (filled[4].tensor, filled[4].name, filled[5]["f"], kwargs) == (4, "x", 5, {"again": 6})
    assert args[1][0] is b  # the caller's own are as they were
    assert structure.key == CallStructure(args, {"again": torch.rand(5)}).key
    assert structure.key != CallStructure((a, [b, 4], *args[2:]), {"again": a}).key


def test_a_trace_keeps_no_tensor_of_the_call():
    x = torch.rand(2, 3)
    made, alive = traced(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), x), weakref.ref(x)
    del x
    assert alive() is None
    assert made.calls


@dataclass
class Halves:
    """Two tensors and a number, on the way to a layer."""

    first: Tensor
    second: Tensor
    factor: float


@pytest.mark.parametrize(
    ("pack", "parts"),
    [
        (lambda a, b: Halves(a, b, 2.0), lambda pair: (pair.first, pair.second, pair.factor)),
        (lambda a, b: {1: a, 2: b, 3: 2.0}, lambda pair: tuple(pair.values())),
    ],
    ids=["data class", "keys that are no names"],
)
def test_containers_reach_a_layer_that_stays_whole(pack: Any, parts: Any) -> None:
    """A container that a graph cannot hold; the layer reads a value."""

    def takes(self: Any, pair: Any) -> Tensor:
        first, second, factor = parts(pair)
        sign = 1.0 if first.sum() > 0 else -1.0
        return self.layer(first) * second * factor * sign

    def packs(self: Any, x: Tensor) -> Tensor:
        hidden = self.before(x)
        return self.after(self.whole(pack(hidden, hidden.tanh())))

    whole = written(takes, layer=nn.Linear(3, 3))
    network = written(packs, before=nn.Linear(3, 3), whole=whole, after=nn.Linear(3, 3)).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    made = traced(network, x)
    assert called(made) == ["before", "whole", "after"]
    for batch in (x, torch.randn(5, 3, dtype=torch.float64)):
        torch.testing.assert_close(run(made, batch), network(batch), rtol=1e-12, atol=1e-12)


@dataclass(slots=True)
class Slotted:
    value: Tensor


def unpacking(pack: Any, unpack: Any) -> nn.Module:
    """Around a layer that stays whole, as it changes its buffer, and returns something else than a tensor."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.after(unpack(self.whole(x), x))

    whole = one_layer(lambda self, x: pack(changes_a_buffer(self, x)))
    return written(forward, whole=whole, after=nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("pack", "unpack"),
    [(lambda value: None, lambda result, x: x), (Slotted, lambda result, x: result.value + x)],
    ids=["nothing", "data class with slots"],
)
def test_results_without_a_dictionary_of_attributes(pack: Any, unpack: Any) -> None:
    network = unpacking(pack, unpack).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    made = traced(network, x)
    assert called(made) == ["whole", "after"]
    torch.testing.assert_close(run(made, x), network(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("result", [3, object()])
def test_results_that_may_change_are_refused(result: Any) -> None:
    network = unpacking(lambda value: result, lambda result, x: x)
    with pytest.raises(NotTraceable, match=f"Network returns a {type(result).__name__}, which may change"):
        traced(network, torch.rand(4, 3))
