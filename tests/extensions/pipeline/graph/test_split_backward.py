"""A backward in two parts comes to what one backward comes to, to the bit, whatever the graph."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from equipoise.extensions.pipeline.graph.split_backward import SplitBackward
from tests.support.equality import assert_equal
from tests.support.networks.layers import network


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.variable = x  # as torch's own ends of a graph have it
        return x * weight, x + weight

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return one * weight + other, (one * x + other).sum(0)


def custom() -> nn.Module:
    """A function with two outputs, of which only one is used on the way."""

    def forward(self: Any, x: Tensor) -> list[Tensor]:
        one, other = Own.apply(x, self.weight)
        again, _ = Own.apply(one, self.last.bias)
        return [self.last(again), other]

    return network(forward, weight=nn.Parameter(torch.rand(6)), last=nn.Linear(6, 6))


def double_gradient(bias: Tensor) -> None:
    assert bias.grad is not None
    bias.grad *= 2


def hooked() -> nn.Module:
    """Hooks that change gradients: of activations, of weights, and of what accumulates."""

    def forward(self: Any, x: Tensor) -> list[Tensor]:
        hidden = self.one(x)
        hidden.register_hook(lambda gradient: gradient * 5)
        made = self.other(hidden.tanh())
        made.register_hook(lambda gradient: gradient + 1)
        return [made]

    one, other = nn.Linear(6, 6), nn.Linear(6, 6)
    made = network(forward, one=one, other=other).double()  # before it has hooks, which stay with the tensors
    one.weight.register_hook(lambda gradient: gradient * 3)
    other.weight.register_hook(lambda gradient: gradient.clamp(max=0.1))
    other.bias.register_post_accumulate_grad_hook(double_gradient)
    return made


def checkpointed() -> nn.Module:
    """A layer that the user checkpoints, with dropout."""

    def forward(self: Any, x: Tensor) -> list[Tensor]:
        return [self.other(checkpoint(self.one, self.other(x), use_reentrant=False))]

    one = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Dropout(0.5), nn.Linear(9, 6))
    return network(forward, one=one, other=nn.Linear(6, 6))


def whole_backward(outputs: list[Tensor], gradients: list[Tensor | None]) -> None:
    """One backward from the outputs that have a gradient."""
    pairs = [(t, one) for t, one in zip(outputs, gradients, strict=True) if one is not None and t.requires_grad]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [one for _, one in pairs])


def gradients(make: Callable[[], nn.Module], *, split: bool) -> list[Any]:
    """The gradients of inputs and of weights, after two micro-batches."""
    torch.manual_seed(3)
    module, found, later = make().double(), [], []
    for _ in range(2):
        x = torch.rand(5, 6).double().requires_grad_()
        made = module(x)
        given = [torch.rand_like(tensor) for tensor in made]
        if split:
            later.append(SplitBackward([x], made))
            found += later[-1].of_inputs(given)
        else:
            whole_backward(made, given)
            found.append(x.grad)
    for parts in later:
        parts.of_weights()
    return [*found, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("make", [custom, hooked, checkpointed])
def test_a_split_backward_has_the_gradients_of_a_whole_one(make):
    assert_equal(gradients(make, split=False), gradients(make, split=True))


def test_a_split_backward_of_random_graphs():
    """Nodes with up to three arguments; weights that are frozen, or used any number of times; outputs that are inputs,
    are there twice, or have no gradient."""
    seed = random.randrange(2**32)
    for turn in range(100):
        runs = []
        for split in (False, True):
            draw = random.Random(seed + turn)
            torch.manual_seed(turn)
            inputs = [torch.rand(3).double().requires_grad_(draw.random() < 0.7) for _ in range(2)]
            weights = [torch.rand(3).double().requires_grad_(draw.random() < 0.8) for _ in range(4)]
            values = [*inputs, *weights]
            for _ in range(draw.randint(1, 25)):
                one, other = draw.choice(values), draw.choice(values)
                values.append(draw.choice([torch.tanh(one), one * other, one + other, torch.addcmul(one, other, one)]))
            made = [draw.choice(values[6:]) for _ in range(3)] + [draw.choice(inputs)]
            given = [None if draw.random() < 0.2 else torch.ones(3).double() for _ in made]
            if split:
                parts = SplitBackward(inputs, made)
                found = parts.of_inputs(given)
                assert all(weight.grad is None for weight in weights)
                parts.of_weights()
            else:
                whole_backward(made, given)
                found = [tensor.grad for tensor in inputs]
            runs.append([*found, *(weight.grad for weight in weights)])
        assert_equal(*runs, 1e-12, title=f"Gradients with seed {seed} in turn {turn}")


def test_the_first_part_of_a_backward_computes_no_weight():
    """And the second no input; a weight that several nodes lead to is the exception."""
    seen: list[str] = []

    class Told(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
            ctx.name = name
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            seen.append(ctx.name)
            return gradient, None

    weights = [torch.rand(3, requires_grad=True) for _ in range(2)]
    x = torch.rand(3, requires_grad=True)
    value = Told.apply(x, "x")
    for index, weight in enumerate(weights):
        value = Told.apply(value * Told.apply(weight, f"weight {index}"), f"value {index}")
    parts = SplitBackward([x], [value])
    parts.of_inputs([torch.ones(3)])
    assert seen == ["value 1", "value 0", "x"]
    seen.clear()
    parts.of_weights()
    assert sorted(seen) == ["weight 0", "weight 1"]


def test_a_split_backward_frees_its_graph():
    weight, x = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    made = (x * weight).sum()
    parts = SplitBackward([x], [made])
    parts.of_inputs([torch.tensor(1.0)])
    parts.of_weights()
    with pytest.raises(RuntimeError, match="second time"):
        made.backward()
