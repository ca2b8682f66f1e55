"""The backward without torch's checks has the results of torch's backward."""

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from equipoise.interop.distributed.backward_calls import BackwardCall, gradients_here, intercept_backwards
from equipoise.interop.torch.autograd import (
    is_changed,
    is_in_backward,
    next_node_number,
    number_of_node,
    run_backward,
    running_node,
)


def test_the_graph_is_freed() -> None:
    loss = torch.ones(2, requires_grad=True).square().sum()
    run_backward(loss, torch.ones_like(loss))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        run_backward(loss, torch.ones_like(loss))


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning", "ignore:Error detected in Sqrt:UserWarning")
def test_anomaly_detection_finds_a_gradient_that_is_not_a_number() -> None:
    negative = torch.tensor(-1.0, requires_grad=True)
    with torch.autograd.detect_anomaly():
        loss = torch.sqrt(negative)
        with pytest.raises(RuntimeError, match="nan values"):
            run_backward(loss, torch.ones_like(loss))


def test_modes_see_the_backward() -> None:
    class Names(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(getattr(function, "__name__", ""))
            return function(*args, **(kwargs or {}))

    leaf = torch.ones(2, requires_grad=True)
    loss = leaf.sum()
    gradient = torch.ones_like(loss)
    with Names() as mode:
        run_backward(loss, gradient)
    assert "backward" in mode.names
    assert leaf.grad is not None


def test_changes_in_place_are_noticed() -> None:
    tensor = torch.ones(())
    assert not is_changed(tensor)
    tensor.mul_(2)
    assert is_changed(tensor)


def test_nodes_are_numbered_in_order() -> None:
    before = next_node_number()
    leaf = torch.ones(2, requires_grad=True)
    nodes = [(leaf * factor).grad_fn for factor in range(3)]
    assert [number_of_node(node) for node in nodes] == [before, before + 1, before + 2]
    assert next_node_number() == before + 3
    # The node at which a leaf receives its gradient has a number beyond all others.
    (accumulation, _), *_ = nodes[0].next_functions
    assert number_of_node(accumulation) >= 2**63


def test_the_node_of_the_running_backward_is_known() -> None:
    assert running_node() is None
    seen = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            seen.append(number_of_node(running_node()))
            return gradient

    output = Watched.apply(torch.ones(2, requires_grad=True))
    number = number_of_node(output.grad_fn)
    output.sum().backward()
    assert seen == [number]
    assert running_node() is None


def test_every_backward_is_intercepted() -> None:
    """Whichever function begins it; one within another says so."""
    seen: list[tuple[bool, bool, int, bool]] = []

    def around(call: BackwardCall) -> Any:
        seen.append((call.accumulates, call.creates_graph, len(call.inputs), is_in_backward()))
        return call.run()

    def again(x: Tensor) -> Tensor:
        return checkpoint(torch.sin, x, use_reentrant=True)

    end = intercept_backwards(around)
    try:
        x = torch.ones(3, requires_grad=True)
        x.sum().backward()
        torch.autograd.backward([x.sum()], inputs=[x])
        (slope,) = grad(x.square().sum(), x, create_graph=True)
        torch.func.grad(lambda x: x.sum())(x)
        again(x).sum().backward()
    finally:
        end()
    x.sum().backward()
    assert torch.equal(slope, 2 * x)
    assert seen == [
        (True, False, 0, False),
        (True, False, 1, False),
        (False, True, 1, False),
        (False, True, 1, False),
        (True, False, 0, False),
        (True, False, 0, True),
    ]


def test_interceptions_end_in_any_order() -> None:
    """And a thread that computes gradients for itself hides none of another."""
    seen: list[str] = []
    engine_call = torch.autograd._engine_run_backward
    x = torch.ones(3, requires_grad=True)

    def note(name: str, call: BackwardCall) -> Any:
        seen.append(name)
        return call.run()

    def meanwhile(gradient: Tensor) -> None:
        thread = threading.Thread(target=lambda: grad(x.sum(), x))
        thread.start()
        thread.join()

    end_first = intercept_backwards(partial(note, "first"))
    end_second = intercept_backwards(partial(note, "second"))
    y = x.detach().requires_grad_()
    hidden = y.sin()
    hidden.register_hook(meanwhile)
    gradients_here(hidden.sum(), [y])
    end_first()
    grad(x.sum(), x)
    end_second()
    grad(x.sum(), x)
    assert seen == ["second", "second"]
    assert torch.autograd._engine_run_backward is engine_call
