"""Split the backward of a stage: gradients of inputs first, gradients of weights later.

Other stages wait for the gradients of inputs; no stage waits for those of weights (Qi et al., "Zero Bubble Pipeline
Parallelism", 2023). In the graph of a stage some nodes lie on a path from an output to an input. From such a node other
edges may lead to weights:

    output ──> node ──> node ──> input        the first half follows this path, and notes what arrives at such nodes
                │         │
                ↓         ↓
              weight    weight                the second half follows these edges, from each of the nodes

The second half begins with the gradient that arrived at a node, before hooks on the node could change it. So a node
with weights runs twice, each time for the edges that are needed, and hooks between layers run twice. If several nodes
lead to one weight, the second half of one node would reach it by way of another, too. The gradient of such a weight
comes from a second backward from the outputs.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

__all__ = ["SplitBackward"]


# Edges of a graph, each with the gradient that arrives there.
Pairs = Sequence[tuple[GradientEdge, Tensor]]


class _WeightBackward(NamedTuple):
    """One backward of the second half.

    Attributes:
        edges: Edges at which it begins.
        gradients: Their gradients.
        weights: Weights at which it ends.
        retains: True if later backwards run through the same part of the graph.
    """

    edges: list[GradientEdge]
    gradients: list[Tensor]
    weights: list[Tensor]
    retains: bool = False


class SplitBackward:
    """The backward of a graph in two halves.

    Args:
        inputs: Leaves at which the graph ends.
        outputs: Tensors at which it begins.

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
        self._inputs = inputs
        self._outputs = outputs
        self._second_half: deque[_WeightBackward] = deque()

    def of_inputs(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the first half.

        Args:
            gradients: Gradients of the outputs, on their devices; None for an output that has none.

        Returns:
            Gradients of the inputs.
        """
        # 1. Find the edges at which the graph begins and ends.
        begins: list[tuple[GradientEdge, Tensor]] = []
        for output, gradient in zip(self._outputs, gradients, strict=True):
            if gradient is not None and output.requires_grad:
                begins.append((get_gradient_edge(output), gradient))
        ends = [get_gradient_edge(tensor) for tensor in self._inputs if tensor.requires_grad]

        # 2. Find the nodes between them from which edges lead to weights.
        begin_edges, begin_gradients = _unzipped(begins)
        paths = _Paths(begin_edges, [end.node for end in ends])
        joints: list[GradientEdge] = []
        for node in paths.weights_of_node:
            for number in sorted(paths.arriving[node]):
                joints.append(GradientEdge(node, number))

        # 3. Compute the gradients of the inputs, and those that arrive at these nodes.
        results: Sequence[Tensor | None] = ()
        if begins and ends:
            results = torch.autograd.grad(
                begin_edges,
                [*ends, *joints],
                begin_gradients,
                retain_graph=True,
                allow_unused=True,
            )
        self._plan_second_half(paths, begins, list(zip(joints, results[len(ends) :], strict=True)))

        # 4. Return None for inputs without gradients.
        remaining = iter(results)
        gradients_of_inputs = []
        for tensor in self._inputs:
            gradient = None
            if tensor.requires_grad:
                gradient = next(remaining, None)
            gradients_of_inputs.append(gradient)
        return gradients_of_inputs

    def _plan_second_half(
        self,
        paths: "_Paths",
        begins: Pairs,
        arrived: Sequence[tuple[GradientEdge, Tensor | None]],
    ) -> None:
        """Note the backwards of the second half.

        Args:
            paths: Paths of the graph.
            begins: Edges of the outputs, with their gradients.
            arrived: Edges of the nodes that lead to weights, with the gradients that arrived there.
        """
        # 1. Weights of several nodes. This backward comes first: it runs through the parts of the others.
        if paths.shared_weights:
            self._add_backward(begins, paths.shared_weights, retains=True)

        # 2. Weights to which only outputs lead that lead to no input.
        if paths.weights_off_path:
            off_path = []
            for edge, gradient in begins:
                if edge.node not in paths.on_path:
                    off_path.append((edge, gradient))
            self._add_backward(off_path, paths.weights_off_path)

        # 3. Weights of one node.
        for node, weights in paths.weights_of_node.items():
            of_node = []
            for edge, arrived_gradient in arrived:
                if edge.node is node and arrived_gradient is not None:
                    of_node.append((edge, arrived_gradient))
            if of_node:
                self._add_backward(of_node, weights)

    def _add_backward(self, begins: Pairs, weights: list[Tensor], *, retains: bool = False) -> None:
        edges, gradients = _unzipped(begins)
        self._second_half.append(_WeightBackward(edges, gradients, weights, retains))

    @property
    def nbytes(self) -> int:
        """Bytes that the first half leaves for the second, beside what is saved in the graph."""
        storages = {}
        for backward in self._second_half:
            for gradient in backward.gradients:
                storage = gradient.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    def of_weights(self) -> None:
        """Run the second half: add to the gradients of weights, and release the graph."""
        while self._second_half:
            backward = self._second_half.popleft()
            torch.autograd.backward(
                backward.edges,
                backward.gradients,
                inputs=backward.weights,
                retain_graph=backward.retains,
            )
        self._inputs = ()
        self._outputs = ()


# A weight, and the nodes on a path that lead to it; None for an output.
_Weight = tuple[Tensor, set[Node | None]]


class _Paths:
    """Nodes of a graph that lie on a path to inputs, and the weights to which each of them leads.

    Args:
        outputs: Edges at which the graph begins.
        ends: Nodes at which it ends at inputs.

    Attributes:
        on_path: Nodes on a path from an output to an input.
        arriving: For each of them the numbers of its gradients that an edge leads to.
        weights_of_node: By such nodes the weights to which only this node leads.
        shared_weights: Weights to which several of them lead, or one of them and an output that is not on a path.
        weights_off_path: Weights to which only outputs lead that are not on a path.
    """

    def __init__(self, outputs: Sequence[GradientEdge], ends: Sequence[Node]) -> None:
        self.on_path: set[Node] = set(ends)
        self.arriving: dict[Node, set[int]] = defaultdict(set)
        self.weights_of_node: dict[Node, list[Tensor]] = defaultdict(list)
        self.shared_weights: list[Tensor] = []
        self.weights_off_path: list[Tensor] = []
        # For nodes that are not on a path the weights to which they lead, by the weights' own nodes.
        self._weights_below: dict[Node, dict[Node, Tensor]] = {}
        # The weights by their own nodes.
        self._sources: dict[Node, _Weight] = {}

        roots = [output.node for output in outputs]
        for node in _in_order(roots):
            edges = _edges_of(node)
            next_nodes = [edge.node for edge in edges]
            if node in self.on_path or not self.on_path.isdisjoint(next_nodes):
                self.on_path.add(node)
                self._follow(node, edges)
            else:
                self._weights_below[node] = self._weights_at(node, edges)
        self._follow(None, outputs)
        self._group_weights()

    def _weights_at(self, node: Node, edges: Sequence[GradientEdge]) -> dict[Node, Tensor]:
        """Return the weights to which a node leads that is not on a path."""
        weights: dict[Node, Tensor] = {}
        if not node.next_functions:
            # Only nodes that accumulate a gradient have a variable.
            variable = getattr(node, "variable", None)
            if isinstance(variable, Tensor):
                weights[node] = variable
        for edge in edges:
            weights.update(self._weights_below[edge.node])
        return weights

    def _follow(self, source: Node | None, edges: Sequence[GradientEdge]) -> None:
        """Note where the edges of a node on a path lead, or those of the outputs, whose source is None."""
        for edge in edges:
            if edge.node in self.on_path:
                self.arriving[edge.node].add(edge.output_nr)
                continue
            weights = self._weights_below[edge.node]
            for end, weight in weights.items():
                _, sources = self._sources.setdefault(end, (weight, set()))
                sources.add(source)

    def _group_weights(self) -> None:
        """Group the weights by the nodes that lead to them."""
        for weight, sources in self._sources.values():
            source, *further_sources = sources
            if further_sources:
                self.shared_weights.append(weight)
            elif source is None:
                self.weights_off_path.append(weight)
            else:
                self.weights_of_node[source].append(weight)


def _unzipped(pairs: Pairs) -> tuple[list[GradientEdge], list[Tensor]]:
    return [edge for edge, _ in pairs], [gradient for _, gradient in pairs]


def _in_order(roots: Sequence[Node]) -> list[Node]:
    """Return all nodes of a graph, each after those to which it leads."""
    order: list[Node] = []
    visited: set[Node] = set()
    # A node is on the stack a second time, with True, below the nodes to which it leads.
    stack = [(root, False) for root in roots]
    while stack:
        node, is_second_visit = stack.pop()
        if is_second_visit:
            order.append(node)
        elif node not in visited:
            visited.add(node)
            stack.append((node, True))
            stack += [(edge.node, False) for edge in _edges_of(node)]
    return order


def _edges_of(node: Node) -> list[GradientEdge]:
    """Return the edges that lead from a node to others. There is none where no gradient flows."""
    edges = []
    for next_node, number in node.next_functions:
        if next_node is not None:
            edges.append(GradientEdge(next_node, number))
    return edges
