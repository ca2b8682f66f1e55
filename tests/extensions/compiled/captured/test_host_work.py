"""Work that a replay would not do again is found before a capture, without a GPU."""

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.extensions.compiled.captured import host_work
from equipoise.extensions.compiled.interop.compiling import CompilerError

CPU = torch.device("cpu")


class Traced(nn.Module):
    """A function as a traced graph has it.

    Args:
        kind: The kind of the node that calls something.
        target: The function, or the name of the method.
    """

    def __init__(self, kind: str, target: Any) -> None:
        super().__init__()
        graph = torch.fx.Graph()
        value = graph.placeholder("value")
        graph.output(graph.create_node(kind, target, (value, value)))
        self.inner = torch.fx.GraphModule(nn.Module(), graph)


def own(value: Tensor) -> Tensor:
    """A function of the user's."""
    return value


KNOWN: list[Callable[..., Any]] = [
    torch.sum,
    torch.nn.functional.relu,
    torch._C._nn.linear,
    torch._C._set_grad_enabled,
    torch.autograd.grad,
    torch.amp.autocast_mode._enter_autocast,
    torch.ops.aten.add.Tensor,
    torch.ops.aten.add,
    Tensor.add,
    operator.getitem,
    operator.iadd,
    getattr,
    math.sqrt,
]


def test_functions_of_torch_are_known() -> None:
    for function in KNOWN:
        host_work.check_functions(Traced("call_function", function))


def test_functions_and_operations_of_others_and_hooks_are_refused() -> None:
    def check(target: Any, words: str, kind: str = "call_function") -> None:
        with pytest.raises(CompilerError, match=words):
            host_work.check_functions(Traced(kind, target))

    check(own, "it calls own, whose Python code a replay would not run")
    with torch.library._scoped_library("host_work_tests", "FRAGMENT") as library:
        library.define("double(Tensor x) -> Tensor")
        for operation in (torch.ops.host_work_tests.double, torch.ops.host_work_tests.double.default):
            check(operation, "host_work_tests")
    check("register_hook", "registers a hook", "call_method")
    host_work.check_functions(Traced("call_method", "detach"))


def test_inputs_that_are_no_tensors_of_the_device_are_refused() -> None:
    host_work.check_inputs([torch.ones(2)], CPU)
    with pytest.raises(CompilerError, match=r"the number 3, which a replay would not read again"):
        host_work.check_inputs([torch.ones(2), 3], CPU)
    with pytest.raises(CompilerError, match="a tensor on meta"):
        host_work.check_inputs([torch.ones(2, device="meta")], CPU)


def test_work_of_the_host_in_a_forward_is_refused() -> None:
    weight = torch.ones(2, requires_grad=True)
    with host_work.on_device_only(CPU):
        (weight * 2).sum().backward()
    with pytest.raises(CompilerError, match="its operation ones computes on meta"), host_work.on_device_only(CPU):
        torch.ones(2, device="meta")
    with pytest.raises(CompilerError, match=r"it reads the value of a tensor"), host_work.on_device_only(CPU):
        weight.sum().item()


def test_work_of_the_host_in_a_backward_is_refused() -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * gradient.sum().item()

    weight = torch.ones(2, requires_grad=True)
    with pytest.raises(CompilerError, match="it reads the value"), host_work.on_device_only(CPU):
        Reads.apply(weight).sum().backward()  # type: ignore[no-untyped-call]


def test_errors_of_the_work_itself_stay_as_they_are() -> None:
    value = torch.ones(2)
    with pytest.raises(ZeroDivisionError), host_work.on_device_only(CPU):
        1 / (value.sum().item() - 2)
