"""Split the backward of a stage: gradients of inputs first, gradients of weights later.

Other stages wait for the gradients of inputs, and nobody for those of weights (Qi et al., "Zero Bubble Pipeline
Parallelism", 2023). In the graph of a stage some nodes lie on a way from an output to an input, and from such a node
other edges may lead to weights:

    output ──> node ──> node ──> input        the first part goes along here, and notes what arrives at such nodes
                │         │
                ↓         ↓
              weight    weight                the second part goes from each of them down here

The second part begins with what arrived at a node before hooks on it could change that. So a node with weights is
computed twice, each time for the edges that are wanted, and hooks on what lies between layers run twice. A weight to
which several nodes lead would be reached from one of them by way of another, too; its gradient is computed by a second
backward from the outputs.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

__all__ = ["SplitBackward"]


Pairs = Sequence[tuple[GradientEdge, Tensor]]


class _Beginning(NamedTuple):
    """Where a part of the gradients of weights begins.

    Attributes:
        edges: The edges.
        gradients: Theirs.
        weights: Where it ends.
        retains: Whether others will go along the same ways.
    """

    edges: list[GradientEdge]
    gradients: list[Tensor]
    weights: list[Tensor]
    retains: bool = False


class SplitBackward:
    """The backward of a graph.

    Args:
        inputs: Where it ends; leaves.
        outputs: Where it begins.

    Example:
        >>> x, weight = torch.ones(2, requires_grad=True), torch.tensor(3.0, requires_grad=True)
        >>> split = SplitBackward([x], [x * weight])
        >>> split.of_inputs([torch.ones(2)]), weight.grad
        ([tensor([3., 3.])], None)
        >>> split.of_weights()
        >>> weight.grad
        tensor(2.)
    """

    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self._inputs, self._outputs = inputs, outputs
        self._begins: deque[_Beginning] = deque()  # of the second part

    def of_inputs(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The first part.

        Args:
            gradients: Those of the outputs, where they lie.

        Returns:
            Those of the inputs.
        """
        pairs = zip(self._outputs, gradients, strict=True)
        given = [(get_gradient_edge(output), one) for output, one in pairs if one is not None and output.requires_grad]
        ends = [get_gradient_edge(tensor) for tensor in self._inputs if tensor.requires_grad]
        ways = _Ways([output for output, _ in given], [end.node for end in ends])
        joints = [GradientEdge(joint, number) for joint in ways.groups for number in sorted(ways.arriving[joint])]
        found: Sequence[Tensor | None] = ()
        if given and ends:
            outputs, ones = _unzipped(given)
            found = torch.autograd.grad(outputs, [*ends, *joints], ones, retain_graph=True, allow_unused=True)
        self._note(ways, given, list(zip(joints, found[len(ends) :], strict=True)))
        answers = iter(found)
        return [next(answers, None) if tensor.requires_grad else None for tensor in self._inputs]

    def _note(self, ways: "_Ways", given: Pairs, arrived: Sequence[tuple[GradientEdge, Tensor | None]]) -> None:
        """Where the second part will begin."""
        if ways.several:  # first, since it goes along ways on which others begin
            self._begins.append(_Beginning(*_unzipped(given), ways.several, True))
        beside = [(edge, one) for edge, one in given if edge.node not in ways.along]
        if ways.beside:
            self._begins.append(_Beginning(*_unzipped(beside), ways.beside))
        for joint, weights in ways.groups.items():
            own = [(edge, one) for edge, one in arrived if edge.node is joint and one is not None]
            if own:
                self._begins.append(_Beginning(*_unzipped(own), weights))

    @property
    def nbytes(self) -> int:
        """What the first part leaves for the second, beside what is saved in the graph."""
        storages = [one.untyped_storage() for begin in self._begins for one in begin.gradients]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def of_weights(self) -> None:
        """The second part: adds to the gradients of weights; afterwards the graph is gone."""
        while self._begins:
            begin = self._begins.popleft()
            torch.autograd.backward(begin.edges, begin.gradients, inputs=begin.weights, retain_graph=begin.retains)
        self._inputs = self._outputs = ()


class _Ways:
    """Which nodes of a graph lie on a way to inputs, and from which of them one comes to which weights.

    Args:
        outputs: Where the graph begins.
        ends: The nodes where it ends at inputs.

    Attributes:
        along: The nodes on a way from an output to an input.
        arriving: For each of them the numbers of its gradients that something leads to.
        groups: By such nodes the weights to which it alone leads.
        several: Weights to which several of them lead, or one of them and an output beside them.
        beside: Weights to which only outputs lead that lead to no input.
    """

    def __init__(self, outputs: Sequence[GradientEdge], ends: Sequence[Node]) -> None:
        order = _in_order([output.node for output in outputs])
        self.along: set[Node] = set(ends)
        self.arriving: dict[Node, set[int]] = {}
        reached: dict[Node, dict[Node, Tensor]] = {}  # for nodes beside the ways, the weights to which they lead
        leads: dict[Node, tuple[Tensor, set[Node | None]]] = {}  # for weights, the nodes on a way from which one comes

        for node in order:
            after = [following for following, _ in node.next_functions if following is not None]
            if node in self.along or not self.along.isdisjoint(after):
                self.along.add(node)
                continue
            weight = None if node.next_functions else getattr(node, "variable", None)
            own = {node: weight} if isinstance(weight, Tensor) else {}
            reached[node] = own | {end: found for each in after for end, found in reached[each].items()}
        for output in outputs:
            self._come(None, output.node, output.output_nr, reached, leads)
        for node in order:
            if node in self.along:
                for following, number in node.next_functions:
                    if following is not None:
                        self._come(node, following, number, reached, leads)
        self.groups: dict[Node, list[Tensor]] = {}
        self.several: list[Tensor] = []
        self.beside: list[Tensor] = []
        for weight, joints in leads.values():
            (joint, *others) = joints
            group = self.several if others else self.beside if joint is None else self.groups.setdefault(joint, [])
            group.append(weight)

    def _come(
        self,
        joint: Node | None,
        node: Node,
        number: int,
        reached: dict[Node, dict[Node, Tensor]],
        leads: dict[Node, tuple[Tensor, set[Node | None]]],
    ) -> None:
        if node in self.along:
            self.arriving.setdefault(node, set()).add(number)
            return
        for end, weight in reached[node].items():
            leads.setdefault(end, (weight, set()))[1].add(joint)


def _unzipped(pairs: Pairs) -> tuple[list[GradientEdge], list[Tensor]]:
    return [one for one, _ in pairs], [other for _, other in pairs]


def _in_order(roots: Sequence[Node]) -> list[Node]:
    """All nodes of a graph, each after those to which it leads."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(following, False) for following, _ in node.next_functions if following is not None]
    return order
