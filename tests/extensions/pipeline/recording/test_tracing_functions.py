"""Autograd functions keep their backward when a forward is followed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


class Sandwich(nn.Module):
    def __init__(self, factor: Any) -> None:
        super().__init__()
        self.first, self.second, self.factor = nn.Linear(2, 2), nn.Linear(2, 2), factor

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Reversal.apply(self.first(x), self.factor))


@pytest.mark.parametrize("factor", [2.0, Options()], ids=["number", "object"])
def test_a_custom_backward_is_not_lost(factor: Any) -> None:
    network = nn.Sequential(Sandwich(factor))
    apply = torch.autograd.Function.apply
    given = torch.randn(3, 2)
    made = traced(network, given)
    assert torch.autograd.Function.apply == apply
    assert made.opaque == {}
    network(given).sum().backward()
    expected = [parameter.grad for parameter in network.parameters()]
    network.zero_grad()
    run(made, given).sum().backward()
    for parameter, gradient in zip(network.parameters(), expected, strict=True):
        assert gradient is not None
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)


def test_what_is_computed_beside_a_trace_is_computed() -> None:
    """A call without anything that is followed runs, also while a forward is followed."""

    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + Reversal.apply(torch.ones(2), 1.0)

    network = Constant()
    assert run(traced(network, torch.ones(2)), torch.ones(2)).tolist() == [2.0, 2.0]
