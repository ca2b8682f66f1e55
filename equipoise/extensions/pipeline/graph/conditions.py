"""Conditions under which a recorded forward serves for other calls."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from equipoise.extensions.pipeline.graph.traced import copy_call

__all__ = [
    "AttributeCondition",
    "IdentityCondition",
    "ShapeCondition",
    "TrainableCondition",
    "ValueCondition",
    "program_of",
]

# Computes the answer to a question from the tensors of a call.
Program = Callable[[Any], Any]
# Adds a question to a graph, and returns its call there. Receives the graph, and a function that returns the copies of
# calls there.
AddQuestion = Callable[[fx.Graph, Callable[[fx.Node], fx.Node]], fx.Node]


class ShapeCondition:
    """Tensors of a call have these shapes.

    Args:
        shapes: The shape for the index of each tensor.
    """

    def __init__(self, shapes: Mapping[int, Sequence[int]]) -> None:
        self._shapes = tuple(shapes.items())

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if the tensors have these shapes."""
        return all(tensors[index].shape == shape for index, shape in self._shapes)


class TrainableCondition:
    """The same parameters require gradients as when the forward was recorded.

    Args:
        parameters: The parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._flags = self._present_flags()

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if the same parameters require gradients."""
        return self._present_flags() == self._flags

    def _present_flags(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters]


class IdentityCondition:
    """Attributes of modules, such as parameters and buffers, are the same tensors.

    Args:
        root: The module to which paths refer.
        paths: Paths of the attributes.
    """

    def __init__(self, root: nn.Module, paths: Iterable[str]) -> None:
        self._attributes: list[tuple[nn.Module, str, Any]] = []
        for path in sorted(set(paths)):
            owner_path, _, name = path.rpartition(".")
            owner = root.get_submodule(owner_path)
            self._attributes.append((owner, name, getattr(owner, name)))

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if the attributes are the same objects."""
        return all(getattr(owner, name, None) is value for owner, name, value in self._attributes)


class AttributeCondition:
    """Attributes of a module, by which its forward may decide, have these values.

    Args:
        module: The module.
        expected: Names and values of the attributes.
    """

    def __init__(self, module: nn.Module, expected: Mapping[str, Any]) -> None:
        self._attributes = vars(module)
        self._expected = expected.items()

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if the attributes have these values."""
        return self._expected <= self._attributes.items()


class ValueCondition:
    """A question about values has this answer. The values follow from the tensors of the call alone.

    Args:
        program_on: Returns for a device a function that computes the answer there from the tensors of the call.
        expected: The answer.
        index: Index of a tensor that the answer depends on.
    """

    def __init__(
        self,
        program_on: Callable[[torch.device], Program],
        expected: Any,
        index: int,
    ) -> None:
        self._program_on = program_on
        self._expected = expected
        self._index = index
        self._programs: dict[torch.device, Program] = {}

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if the answer is the same for these tensors."""
        # 1. The answer is computed where the tensors are.
        device = tensors[self._index].device
        program = self._programs.get(device)
        if program is None:
            program = self._program_on(device)
            self._programs[device] = program
        try:
            with torch.no_grad():
                result = program(tuple(tensors))
        except Exception:
            # Tensors of other shapes may have no answer.
            return False

        # 2. Values of several types are equal, such as 1 and True.
        if type(result) is not type(self._expected):
            return False
        return bool(result == self._expected)


def program_of(
    root: nn.Module,
    values: Sequence[fx.Node],
    device: torch.device,
    add_question: AddQuestion,
) -> Program:
    """Return a function that computes the answer to a question from the tensors of a call.

    Args:
        root: Root of the recorded forward.
        values: The calls whose values the question is about.
        device: Device of the tensors.
        add_question: Adds the question to a graph; receives the graph, and a function from these calls to those in the
            graph.
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
    question = add_question(graph, copies.__getitem__)
    graph.output(question)
    graph_module = fx.GraphModule(root, graph)
    program: Program = graph_module.forward
    return program
