"""Autograd functions keep their backward when a forward is followed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.equality import assert_equal
from tests.support.networks.layers import network as written
from tests.support.traces import run, traced


class Options:
    """An argument that a graph holds as an object."""

    factor = 3.0


class Reversal(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a negative number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float | Options) -> Tensor:
        ctx.factor = factor if isinstance(factor, float) else factor.factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -ctx.factor * gradients[0], None


@pytest.mark.parametrize("factor", [2.0, Options()], ids=["number", "object"])
def test_a_custom_backward_is_not_lost(factor: Any) -> None:
    def reverses(self: Any, x: Tensor) -> Tensor:
        return self.second(Reversal.apply(self.first(x), factor))

    network = nn.Sequential(written(reverses, first=nn.Linear(2, 2), second=nn.Linear(2, 2)))
    apply = torch.autograd.Function.apply
    given = torch.randn(3, 2)
    made = traced(network, given)
    assert torch.autograd.Function.apply == apply
    assert made.opaque == {}
    gradients = []
    for output in (network(given), run(made, given)):
        network.zero_grad()
        output.sum().backward()
        gradients.append([parameter.grad for parameter in network.parameters()])
    assert all(gradient is not None for gradient in gradients[0])
    assert_equal(*gradients)


def test_an_autograd_function_of_constants_is_computed() -> None:
    """A call without anything that is followed runs, also while a forward is followed."""

    network = written(lambda self, x: x + Reversal.apply(torch.ones(2), 1.0))
    assert run(traced(network, torch.ones(2)), torch.ones(2)).tolist() == [2.0, 2.0]
