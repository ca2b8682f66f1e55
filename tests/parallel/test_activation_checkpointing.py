"""Activation checkpointing: the same to the bit in less memory, and nothing of it afterwards."""

import pickle
import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torchmetrics import MeanMetric

from equipoise.parallel.activation_checkpointing import checkpoint_activations, is_checkpointed, keep_activations
from tests.support.equality import assert_equal
from tests.support.trainer_runs import refuses


class Drawn(nn.Module):
    """Draws from Python's and numpy's generators, counts its calls, keeps what it saw, and changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.calls, self.seen = 0, torch.zeros(())
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("last", None)

    def forward(self, x: Tensor, *, factor: float = 1.0) -> dict[str, Tensor]:
        self.calls += 1
        self.scale += random.random()
        self.scale = self.scale * 1.5
        out = torch.tanh(self.layer(x)) * (self.scale * np.random.rand() * factor)
        self.last, self.seen = out.detach().mean(0), out
        return {"out": out.relu()}


class Net(nn.Module):
    """All kinds of layers that could tell that they are computed twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.4), nn.BatchNorm1d(8)) for _ in range(3)
        )
        self.spectral = nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Tanh())
        self.drawn = Drawn()
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.drawn(self.spectral(x), factor=0.5)["out"])


def compute(net: nn.Module, steps: int = 2, **autocast: Any) -> tuple[list[Tensor], dict[str, Tensor], list[float]]:
    """Gradients and state after some steps, and what is drawn next."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", enabled=bool(autocast), **autocast):
            loss = net(torch.randn(5, 6)).square().mean()
        loss.backward()
        optimizer.step()
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    return [p.grad.clone() for p in net.parameters() if p.grad is not None], dict(net.state_dict()), drawn


@pytest.mark.parametrize(
    ("patterns", "autocast"),
    [(["blocks.*"], {"dtype": torch.bfloat16}), (["blocks.1", "spectral", "drawn"], {}), (["*"], {})],
    ids=["blocks, with autocast", "some", "all"],
)
def test_recomputed_activations_give_the_same_bits(patterns: list[str], autocast: dict[str, Any]) -> None:
    plain, net = Net(), Net()
    checkpoint_activations(net, patterns)
    assert list(net.state_dict()) == list(plain.state_dict())
    assert_equal(compute(plain, **autocast), compute(net, **autocast))
    assert plain.drawn.calls == net.drawn.calls
    assert torch.equal(plain.drawn.seen, net.drawn.seen)


def test_activation_checkpointing_can_be_taken_back() -> None:
    net = Net()
    before = [dict(vars(part)) for part in net.modules()]
    assert checkpoint_activations(net, ["spectral.0*", "drawn"]) == ["spectral.0", "drawn"]
    checkpoint_activations(net, ["drawn"])  # again, which changes nothing
    assert [name for name, part in net.named_modules() if is_checkpointed(part)] == ["spectral.0", "drawn"]
    keep_activations(net)
    keep_activations(net)
    assert [dict(vars(part)) for part in net.modules()] == before


def test_a_forward_that_is_an_attribute() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].forward = own = lambda x: x * net[0].weight.sum()
    checkpoint_activations(net, ["0"])
    given = torch.ones(2)
    assert torch.equal(net(given), given * net[0].weight.sum())
    net(given).sum().backward()
    keep_activations(net)
    assert net[0].forward is own


def test_the_outermost_is_meant_and_containers_are_passed_over() -> None:
    net = Net()
    assert checkpoint_activations(net, ["blocks*", "blocks.0.1"]) == ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize("duplicate", [deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["copy", "pickle"])
def test_copies_compute_with_their_own_parameters(duplicate: Callable[[Any], Any]) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    checkpoint_activations(net, ["0"])
    copied = duplicate(net)
    copied(torch.ones(2)).sum().backward()
    assert net[0].weight.grad is None
    assert copied[0].weight.grad is not None


def test_an_error_in_the_second_forward_leaves_everything_in_its_place() -> None:
    net = Net()
    checkpoint_activations(net, ["drawn"])
    loss = net(torch.ones(3, 6)).sum()
    calls, scale = net.drawn.calls, net.drawn.scale

    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("as it happens")

    net.drawn.layer.forward = fails
    state = random.getstate()
    with pytest.raises(RuntimeError, match="as it happens"):
        loss.backward()
    assert net.drawn.calls == calls
    assert net.drawn.scale is scale
    assert random.getstate() == state


def test_what_cannot_be_done_is_refused() -> None:
    net = Net()
    wrong = lambda *patterns: lambda: checkpoint_activations(net, patterns)  # noqa: E731
    refuses(wrong("first", "block.*"), "'block.*' matches no submodule of Net", "nearest: ", "blocks.")
    assert not any(map(is_checkpointed, net.modules()))
    refuses(wrong("blocks"), "'blocks' matches no submodule of Net with a forward")
    net.drawn.metric = MeanMetric()
    refuses(wrong("drawn"), "'drawn' holds a metric, which would see every batch twice")


def test_classes_name_their_submodules() -> None:
    """A class of which there is no submodule names none."""
    net = Net()
    assert checkpoint_activations(net, [Drawn, nn.Conv1d, "last"]) == ["drawn", "last"]
    keep_activations(net)
    assert checkpoint_activations(net, [nn.Conv1d]) == []
