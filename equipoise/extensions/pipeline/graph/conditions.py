"""Conditions under which a recorded forward serves for other calls."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn

from equipoise.extensions.pipeline.graph.traced import Condition, copy_call, on_device

__all__ = ["same_answer", "same_attributes", "same_objects", "same_shapes", "same_trainable"]


def same_shapes(shapes: Mapping[int, Sequence[int]]) -> Condition:
    """Return the condition that tensors of a call have shapes, given by their indices."""

    def holds(tensors: Sequence[Tensor]) -> bool:
        return all(tensors[index].shape == shape for index, shape in shapes.items())

    return holds


def same_trainable(parameters: Sequence[nn.Parameter]) -> Condition:
    """Return the condition that the same parameters require gradients as now."""
    flags = [parameter.requires_grad for parameter in parameters]
    return lambda tensors: [parameter.requires_grad for parameter in parameters] == flags


def same_objects(root: nn.Module, paths: Iterable[str]) -> Condition:
    """Return the condition that attributes of modules, such as parameters and buffers, are the same objects as now.

    Args:
        root: The module to which paths refer.
        paths: Paths of the attributes.
    """
    attributes: list[tuple[nn.Module, str, Any]] = []
    for path in sorted(set(paths)):
        owner_path, _, name = path.rpartition(".")
        owner = root.get_submodule(owner_path)
        attributes.append((owner, name, getattr(owner, name)))

    def holds(tensors: Sequence[Tensor]) -> bool:
        return all(getattr(owner, name, None) is value for owner, name, value in attributes)

    return holds


def same_attributes(module: nn.Module, expected: Mapping[str, Any]) -> Condition:
    """Return the condition that attributes of a module, by which its forward may decide, have values."""
    attributes = vars(module)
    return lambda tensors: expected.items() <= attributes.items()


def same_answer(
    root: nn.Module,
    question: Callable[..., Any],
    arguments: tuple[Any, Any],
    expected: Any,
    index: int,
) -> Condition:
    """Return the condition that a question about values, which depend on a call's tensors alone, has the same answer.

    Args:
        root: Root of the recorded forward.
        question: The question, a function.
        arguments: Its positional and keyword arguments, with recorded calls in the place of tensors.
        expected: The answer.
        index: Index of a tensor that the answer depends on.
    """

    @cache
    def program_on(device: torch.device) -> fx.GraphModule:
        return _compiled(root, question, arguments, device)

    def holds(tensors: Sequence[Tensor]) -> bool:
        # The answer is computed where the tensors are.
        program = program_on(tensors[index].device)
        try:
            with torch.no_grad():
                # A call of the program itself would print its errors.
                result = program.forward(tuple(tensors))
        except Exception:
            # Tensors of other shapes may have no answer.
            return False
        # Values of several types are equal, such as 1 and True.
        if type(result) is not type(expected):
            return False
        return bool(result == expected)

    return holds


def _compiled(
    root: nn.Module,
    question: Callable[..., Any],
    arguments: tuple[Any, Any],
    device: torch.device,
) -> fx.GraphModule:
    """Return a program that computes the arguments of a question, by the recorded calls, and asks it."""
    # 1. Find these calls.
    needed: set[fx.Node] = set()
    waiting: list[fx.Node] = []
    fx.map_arg(arguments, waiting.append)
    recorded = waiting[0].graph
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting.extend(node.all_input_nodes)

    # 2. Copy them in their order. The first one is the placeholder.
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in recorded.nodes:
        if node in needed:
            copies[node] = copy_call(graph, node, copies, device)
    copied_arguments: Any = fx.map_arg(arguments, copies.__getitem__)
    args, kwargs = on_device(device, copied_arguments)
    graph.output(graph.call_function(question, args, kwargs))
    return fx.GraphModule(root, graph)
