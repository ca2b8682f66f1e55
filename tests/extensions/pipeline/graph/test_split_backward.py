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


def linears(count: int) -> list[nn.Linear]:
    return [nn.Linear(6, 6) for _ in range(count)]


def tied() -> nn.Module:
    """A weight is used on the way and beside it, twice, and once by way of another."""

    def forward(self: Any, x: Tensor) -> Any:
        hidden = torch.tanh(self.one(x))
        return torch.tanh(self.other(hidden)) @ self.one.weight + self.one.bias, self.other.bias * 2

    one, other = linears(2)
    other.weight = one.weight
    return network(forward, one=one, other=other)


def skips() -> nn.Module:
    """Hands on what it was given, what it made, and one of them twice."""

    def forward(self: Any, x: Tensor) -> Any:
        hidden = self.layers[0](x)
        made = self.layers[1](hidden.relu()) + x * self.scale.exp().softmax(0)
        return [x, hidden, {"made": made, "again": made}, self.layers[2](self.scale), hidden.detach()]

    return network(forward, layers=nn.ModuleList(linears(3)), scale=nn.Parameter(torch.rand(6)))


def frozen() -> nn.Module:
    layers = linears(4)
    layers[1].requires_grad_(False)
    layers[3].bias.requires_grad_(False)
    return nn.Sequential(*layers)


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

    def forward(self: Any, x: Tensor) -> Any:
        one, other = Own.apply(x, self.weight)
        again, _ = Own.apply(one, self.last.bias)
        return self.last(again), other

    return network(forward, weight=nn.Parameter(torch.rand(6)), last=nn.Linear(6, 6))


def double_gradient(bias: Tensor) -> None:
    assert bias.grad is not None
    bias.grad *= 2


def hooked() -> nn.Module:
    """Hooks that change gradients: of activations, of weights, and of what accumulates."""

    def forward(self: Any, x: Tensor) -> Any:
        hidden = self.one(x)
        hidden.register_hook(lambda gradient: gradient * 5)
        made = self.other(hidden.tanh())
        made.register_hook(lambda gradient: gradient + 1)
        return made

    one, other = linears(2)
    made = network(forward, one=one, other=other).double()  # before it has hooks, which stay with the tensors
    one.weight.register_hook(lambda gradient: gradient * 3)
    other.weight.register_hook(lambda gradient: gradient.clamp(max=0.1))
    other.bias.register_post_accumulate_grad_hook(double_gradient)
    return made


def checkpointed() -> nn.Module:
    """A layer that the user checkpoints, with dropout."""

    def forward(self: Any, x: Tensor) -> Any:
        return self.other(checkpoint(self.one, self.other(x), use_reentrant=False))

    one = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Dropout(0.5), nn.Linear(9, 6))
    return network(forward, one=one, other=nn.Linear(6, 6))


def passing() -> nn.Module:
    """Nothing is trained, or nothing passes."""
    return network(lambda self, x: (x, torch.tanh(x)))


NETWORKS = [tied, skips, frozen, custom, hooked, checkpointed, passing]


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [tensor for item in items for tensor in tensors(item)]


def go(make: Callable[[], nn.Module], *, split: bool, learns: bool, missing: bool) -> tuple[list[Any], list[Any]]:
    """The gradients of inputs and of weights, after two micro-batches."""
    torch.manual_seed(3)
    module, draw, found = make().double(), random.Random(4), []
    later = []
    for _ in range(2):
        x = torch.rand(5, 6).double().requires_grad_(learns)
        made = tensors(module(x))
        given = [None if missing and draw.random() < 0.5 else torch.rand_like(tensor) for tensor in made]
        if split:
            parts = SplitBackward([x], made)
            found += parts.of_inputs(given)
            later.append(parts)
        else:
            pairs = [(t, one) for t, one in zip(made, given, strict=True) if one is not None and t.requires_grad]
            if pairs:
                torch.autograd.backward([t for t, _ in pairs], [one for _, one in pairs])
            found.append(x.grad)
    if split:
        before = [parameter.grad for parameter in module.parameters()]
        assert before == [None] * len(before)
    for parts in later:
        parts.of_weights()
    return found, [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("make", NETWORKS)
def test_a_split_backward_has_the_gradients_of_a_whole_one(make, learns, missing):
    expected, actual = (go(make, split=split, learns=learns, missing=missing) for split in (False, True))
    assert_equal(expected, actual)


def test_a_split_backward_of_random_graphs():
    """Nodes with up to three arguments, weights used any number of times."""
    seed = random.randrange(2**32)
    for turn in range(100):
        runs = []
        for split in (False, True):
            draw = random.Random(seed + turn)
            torch.manual_seed(turn)
            inputs = [torch.rand(3).double().requires_grad_(draw.random() < 0.7) for _ in range(2)]
            weights = [torch.rand(3).double().requires_grad_() for _ in range(4)]
            values = [*inputs, *weights]
            for _ in range(draw.randint(1, 25)):
                one, other = draw.choice(values), draw.choice(values)
                values.append(draw.choice([torch.tanh(one), one * other, one + other, torch.addcmul(one, other, one)]))
            made = draw.sample(values[6:], min(3, len(values) - 6))
            ones = [torch.ones(3).double() for _ in made]
            if split:
                parts = SplitBackward(inputs, made)
                found = parts.of_inputs(ones)
                parts.of_weights()
            else:
                if pairs := [tensor for tensor in made if tensor.requires_grad]:
                    torch.autograd.backward(pairs, ones[: len(pairs)])
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
