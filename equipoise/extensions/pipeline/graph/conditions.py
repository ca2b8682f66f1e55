"""Conditions under which a recorded forward serves for other calls."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn

from equipoise.extensions.pipeline.graph.traced import CallInterpreter, Condition

__all__ = ["same_answer", "same_attributes", "same_objects", "same_shapes", "same_trainable"]


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


def same_answer(
    root: nn.Module,
    question: Callable[..., Any],
    args: Any,
    kwargs: Any,
    expected: Any,
    index: int,
) -> Condition:
    """Return the condition that a question about values has an answer. The values follow from a call's tensors alone.

    Args:
        root: Root of the recorded forward.
        question: The question, a function.
        args: Its positional arguments, with recorded calls in the place of tensors.
        kwargs: Its keyword arguments, likewise.
        expected: The answer.
        index: Index of a tensor that the answer depends on.
    """
    arguments = (args, kwargs)
    placeholder, *calls = _calls_before(arguments)
    graph = placeholder.graph

    @cache
    def interpreter_on(device: torch.device) -> CallInterpreter:
        return CallInterpreter(root, graph, device, releases=False)

    def answer(tensors: Sequence[Tensor]) -> Any:
        # The answer is computed where the tensors are.
        device = tensors[index].device
        values = {placeholder: tuple(tensors)}
        present_args, present_kwargs = interpreter_on(device).arguments_after(calls, arguments, values)
        return question(*present_args, **present_kwargs)

    def holds(tensors: Sequence[Tensor]) -> bool:
        try:
            with torch.no_grad():
                result = answer(tensors)
        except Exception:
            # Tensors of other shapes may have no answer.
            return False
        # Values of several types are equal, such as 1 and True.
        if type(result) is not type(expected):
            return False
        return bool(result == expected)

    return holds


def _calls_before(arguments: Any) -> list[fx.Node]:
    """Return the calls from which arguments follow, in their order. The first one is the placeholder."""
    needed: set[fx.Node] = set()
    waiting: list[fx.Node] = []
    fx.map_arg(arguments, waiting.append)
    graph = waiting[0].graph
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting.extend(node.all_input_nodes)
    return [node for node in graph.nodes if node in needed]
