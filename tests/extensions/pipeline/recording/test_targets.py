"""Functions of torch as calls of a graph."""

import operator
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from equipoise.extensions.pipeline.recording.targets import name_of, present_modes, target_of, under_modes


class Noting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def function_in(compute: Any, x: Tensor) -> Any:
    with Noting() as mode:
        compute(x)
    return mode.functions[0]


@pytest.mark.parametrize(
    ("compute", "name", "op"),
    [
        (lambda x: x + 1, "add", "call_method"),
        (lambda x: 1 - x, "__rsub__", "call_method"),
        (lambda x: x[0], "__getitem__", "call_method"),
        (lambda x: x.mT, "mT", "call_function"),
        (lambda x: x.shape, "shape", "call_function"),
        (lambda x: x.view(-1), "view", "call_method"),
        (lambda x: torch.ones_like(x), "ones_like", "call_function"),
        (lambda x: torch.arange(3), "arange", "call_function"),
        (lambda x: nn.functional.linear(x, x), "linear", "call_function"),
        (lambda x: nn.functional.softmax(x, -1), "softmax", "call_function"),
    ],
)
def test_functions_methods_and_attributes(compute, name, op):
    function = function_in(compute, torch.rand(2, 2))
    assert name_of(function) == name
    assert target_of(function).op == op


def test_an_attribute_is_looked_up():
    x = torch.rand(2, 3)
    target = target_of(function_in(lambda value: value.mT, x))
    graph = fx.Graph()
    node = target.add_to(graph, [graph.placeholder("x")], {})
    graph.output(node)
    assert node.target is getattr
    assert torch.equal(fx.GraphModule(nn.Module(), graph)(x), x.mT)


@pytest.mark.parametrize("gradients", [True, False])
def test_a_call_in_other_modes(gradients):
    with torch.set_grad_enabled(gradients), torch.autocast("cpu", torch.bfloat16, enabled=gradients):
        modes = present_modes()
    x = torch.rand(2, 2, requires_grad=True)
    for function, args in ((operator.matmul, (x, x)), (torch.Tensor.matmul, (x, x))):
        target = under_modes(target_of(function), modes)
        copied = pickle.loads(pickle.dumps(target.target))
        for call in (target.target, copied):
            with torch.set_grad_enabled(not gradients):
                value = call(*args)
            assert value.requires_grad == gradients
            assert value.dtype == (torch.bfloat16 if gradients else torch.float32)
        assert target.target.__name__ == "matmul"
