"""Autograd functions keep their backward when a forward is followed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.extensions.pipeline.graph.call_structure import CallStructure
from equipoise.extensions.pipeline.graph.stages import make_stages
from equipoise.extensions.pipeline.recording.tracing import trace


class Reversal(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a negative number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -ctx.factor * gradients[0], None


class Options:
    """An argument that a graph holds as an object."""

    factor = 3.0


class Sandwich(nn.Module):
    def __init__(self, options: Any) -> None:
        super().__init__()
        self.first, self.second, self.options = nn.Linear(2, 2), nn.Linear(2, 2), options

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = Reversal.apply(x, self.options) if isinstance(self.options, float) else Untold.apply(x, self.options)
        return self.second(x)


class Untold(torch.autograd.Function):
    """The same with its factor in an object."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, options: Options) -> Tensor:
        ctx.factor = options.factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -ctx.factor * gradients[0], None


@pytest.mark.parametrize("options", [2.0, Options()], ids=["number", "object"])
def test_a_custom_backward_is_not_lost(options: Any) -> None:
    network = nn.Sequential(Sandwich(options))
    apply = torch.autograd.Function.apply
    given = torch.randn(3, 2)
    traced = trace(network, network.forward, CallStructure((given,), {}))
    assert torch.autograd.Function.apply == apply
    assert traced.opaque == {}
    (stage,) = make_stages(traced, [len(traced.calls)])
    network(given).sum().backward()
    expected = [parameter.grad for parameter in network.parameters()]
    network.zero_grad()
    stage.run((given,)).sum().backward()
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
    traced = trace(network, network.forward, CallStructure((torch.ones(2),), {}))
    (stage,) = make_stages(traced, [len(traced.calls)])
    assert stage.run((torch.ones(2),)).tolist() == [2.0, 2.0]
