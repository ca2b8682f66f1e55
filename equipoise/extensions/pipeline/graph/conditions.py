"""Conditions under which a recorded forward serves for other calls."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn

from equipoise.extensions.pipeline.graph.traced import Condition, copy_call, on_device

__all__ = ["program_of", "same_answer", "same_attributes", "same_objects", "same_shapes", "same_trainable"]

# Computes the answer to a question from the tensors of a call.
Program = Callable[[Any], Any]
# Adds a call to a graph, with positional and keyword arguments, and returns it.
AddCall = Callable[[fx.Graph, Sequence[Any], dict[str, Any]], fx.Node]


def same_shapes(shapes: Mapping[int, Sequence[int]]) -> Condition:
    """Return the condition that tensors of a call have shapes.

    Args:
        shapes: The shape for the index of each tensor.
    """

    def holds(tensors: Sequence[Tensor]) -> bool:
        return all(tensors[index].shape == shape for index, shape in shapes.items())

    return holds


def same_trainable(parameters: Sequence[nn.Parameter]) -> Condition:
    """Return the condition that the same parameters require gradients as now."""
    flags = [parameter.requires_grad for parameter in parameters]

    def holds(tensors: Sequence[Tensor]) -> bool:
        return [parameter.requires_grad for parameter in parameters] == flags

    return holds


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
    """Return the condition that attributes of a module, by which its forward may decide, have values.

    Args:
        module: The module.
        expected: Names and values of the attributes.
    """
    attributes = vars(module)

    def holds(tensors: Sequence[Tensor]) -> bool:
        return expected.items() <= attributes.items()

    return holds


def same_answer(program_on: Callable[[torch.device], Program], expected: Any, index: int) -> Condition:
    """Return the condition that a question about values has an answer. The values follow from a call's tensors alone.

    Args:
        program_on: Returns for a device a function that computes the answer there from the tensors of the call.
        expected: The answer.
        index: Index of a tensor that the answer depends on.
    """
    program_of_device = cache(program_on)

    def holds(tensors: Sequence[Tensor]) -> bool:
        # 1. The answer is computed where the tensors are.
        program = program_of_device(tensors[index].device)
        try:
            with torch.no_grad():
                result = program(tuple(tensors))
        except Exception:
            # Tensors of other shapes may have no answer.
            return False

        # 2. Values of several types are equal, such as 1 and True.
        if type(result) is not type(expected):
            return False
        return bool(result == expected)

    return holds


def program_of(
    root: nn.Module,
    values: Sequence[fx.Node],
    device: torch.device,
    arguments: Any,
    add_question: AddCall,
) -> Program:
    """Return a function that computes the answer to a question from the tensors of a call.

    Args:
        root: Root of the recorded forward.
        values: The calls whose values the question is about.
        device: Device of the tensors.
        arguments: Positional and keyword arguments of the question, with these calls.
        add_question: Adds the question to a graph.
    """
    # 1. Find the calls from which these values follow.
    needed: set[fx.Node] = set()
    waiting = list(values)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting.extend(node.all_input_nodes)

    # 2. Copy them in their order. The program takes the tensors by the placeholder, also if it needs none of them.
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    recorded_graph = values[0].graph
    for node in recorded_graph.nodes:
        is_needed = node.op == "placeholder" or node in needed
        if is_needed:
            copies[node] = copy_call(graph, node, copies, device)

    # 3. Return the answer.
    args, kwargs = fx.map_arg(on_device(device, arguments), copies.__getitem__)
    graph.output(add_question(graph, args, dict(kwargs)))
    graph_module = fx.GraphModule(root, graph)
    program: Program = graph_module.forward
    return program
