"""A graph of torch.export that is cut in two where a module of the network begins."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.split_module import split_module
from torch_export import Graph

__all__ = ["cut_in_two", "module_of"]

MOST_TRIES = 8
"""Places for a cut that are tried, from the middle outwards."""


def module_of(call: fx.Node) -> str:
    """The name of the module in whose forward an operation ran; empty if that is the network."""
    names = [name for name, _ in call.meta.get("nn_module_stack", {}).values()]
    return names[-1] if names else ""


def cut_in_two(graph: Graph, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Computes gradients by two halves, between which values are detached as between stages.

    Args:
        graph: The graph.
        tensors: The tensors of a call.

    Returns:
        Where the second half begins, how many values pass, and the deviation of the gradients from those of the whole;
        nothing if no place that was tried is possible.
    """
    expected = _gradients(graph.module, graph.module, tensors, None)
    for call in _beginnings(graph)[:MOST_TRIES]:
        halves = _halves(graph, call)
        between = _Between(halves)
        try:
            actual = _gradients(halves, graph.module, tensors, between)
        except RuntimeError:
            continue  # a value that passes is changed in place
        distance = sum(float((one - other).square().sum()) for one, other in zip(expected, actual, strict=True))
        length = sum(float(one.square().sum()) for one in expected)
        deviation = (distance / length) ** 0.5 if distance else 0.0  # all gradients may be 0
        return {"before": module_of(call), "passed": len(between.passed), "deviation": deviation}
    return {}


def _beginnings(graph: Graph) -> list[fx.Node]:
    """The operations with which modules begin, the nearest to the middle first."""
    calls = graph.calls
    middle = len(calls) / 2
    found = []
    for index, (before, call) in enumerate(pairwise(calls), start=1):
        if module_of(before) != module_of(call):
            found.append((abs(index - middle), index))
    return [calls[index] for _, index in sorted(found)]


def _halves(graph: Graph, begin: fx.Node) -> fx.GraphModule:
    second = set(graph.calls[graph.calls.index(begin) :])
    return split_module(graph.module, graph.module, lambda node: int(node in second))


class _Between(fx.Interpreter):
    """Runs halves, and detaches what the first one returns.

    Attributes:
        passed: The values that have a graph, with the leaves that stand for them from there on.
    """

    def __init__(self, halves: fx.GraphModule) -> None:
        super().__init__(halves)
        self.passed: list[tuple[Tensor, Tensor]] = []

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_module(target, args, kwargs)
        if target != "submod_0":
            return result
        return tuple(map(self._leaf, result)) if isinstance(result, tuple) else self._leaf(result)

    def _leaf(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.grad_fn is None:
            return value
        leaf = value.detach().requires_grad_()
        self.passed.append((value, leaf))
        return leaf


def _gradients(
    module: fx.GraphModule, whole: fx.GraphModule, tensors: Sequence[Tensor], between: _Between | None
) -> list[Tensor]:
    """The gradients of all parameters, of the mean squares of the outputs."""
    parameters = list(whole.parameters())
    for parameter in parameters:
        parameter.grad = None
    torch.manual_seed(0)  # some models drop values by a function, at a rate of their own
    outputs = module(*tensors) if between is None else between.run(*tensors)
    torch.stack([output.square().mean() for output in outputs if output.requires_grad]).sum().backward()
    if between is not None:
        pairs = [(value, leaf.grad) for value, leaf in between.passed if leaf.grad is not None]
        torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])
    return [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in parameters]
