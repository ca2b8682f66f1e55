"""Sums of gradients in the order of a fixed tree, whichever process computes which parts.

The leaves of the tree are the parts of a step, in their order. A node is the sum of its two children, left plus right,
or its only child. A process adds what lies within its parts; the nodes that remain are exchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.interop.torch import foreach
from equipoise.parallel.communication.processes import Processes

__all__ = ["GradientTree", "Gradients", "Node", "added", "give_gradients", "remaining_nodes", "take_gradients"]

# Gradients of the parameters, in their order; None where a parameter has none.
Gradients = list[Tensor | None]
# What other processes need to know of a gradient: nothing of a dense one; of a sparse one the number of its dimensions
# that are sparse, and of its entries. None: there is no gradient.
Form = tuple[int, ...] | None


@dataclass(frozen=True, order=True)
class Node:
    """A node of the tree.

    Attributes:
        level: Its level; leaves have level 0.
        index: Its index among the nodes of its level.
    """

    level: int
    index: int

    @property
    def parent(self) -> "Node":
        """The node above."""
        return Node(self.level + 1, self.index // 2)

    @property
    def sibling(self) -> "Node":
        """The other child of the node above."""
        return Node(self.level, self.index ^ 1)

    def is_beyond(self, leaves: int) -> bool:
        """Return True if the tree has no such node, as none of its leaves exists.

        Args:
            leaves: The number of leaves of the tree.
        """
        return self.index << self.level >= leaves


def remaining_nodes(first: int, end: int, leaves: int) -> list[Node]:
    """Return the nodes that remain when the leaves from `first` to before `end` are added as far as possible.

    Args:
        first: The first leaf.
        end: The leaf after the last one.
        leaves: The number of leaves of the tree.

    Example:
        >>> remaining_nodes(0, 3, 8)
        [Node(level=1, index=0), Node(level=0, index=2)]
    """
    nodes: list[Node] = []
    for leaf in range(first, end):
        node = Node(0, leaf)
        while not _is_root(node, leaves):
            if node.sibling.is_beyond(leaves):
                node = node.parent
            elif nodes and nodes[-1] == node.sibling:
                nodes.pop()
                node = node.parent
            else:
                break
        nodes.append(node)
    return nodes


def _is_root(node: Node, leaves: int) -> bool:
    return node.index == 0 and 1 << node.level >= leaves


class GradientTree:
    """Adds the gradients of the parts of a step.

    Args:
        leaves: The number of parts of a step.
        ranges: The first part of each process and the part after its last one, by rank.
        processes: The processes.
    """

    def __init__(self, leaves: int, ranges: Sequence[tuple[int, int]], processes: Processes) -> None:
        self._leaves = leaves
        self._ranges = ranges
        self._processes = processes
        # The sums of this process in the present step, in the order of their leaves.
        self._sums: list[tuple[Node, Gradients]] = []

    def add(self, part: int, gradients: Gradients) -> None:
        """Add the gradients of a part of this process; parts come in their order.

        Args:
            part: The number of the part.
            gradients: Its gradients, which the tree may change.
        """
        self._add_node(Node(0, part), gradients)

    def _add_node(self, node: Node, gradients: Gradients) -> None:
        while not _is_root(node, self._leaves):
            if node.sibling.is_beyond(self._leaves):
                node = node.parent
            elif self._sums and self._sums[-1][0] == node.sibling:
                _, left = self._sums.pop()
                gradients = added(left, gradients)
                node = node.parent
            else:
                break
        self._sums.append((node, gradients))

    def forms(self) -> list[list[Form]]:
        """Return the forms of the gradients in each sum of this process."""
        return [[_form_of(gradient) for gradient in gradients] for _, gradients in self._sums]

    def clear(self) -> None:
        """Forget the sums of a step that failed."""
        self._sums = []

    def total(self, like: Sequence[Tensor], forms: Sequence[list[list[Form]]]) -> Gradients:
        """Return the sum over all parts of all processes, the same in each of them, and begin the next step.

        Args:
            like: The parameters.
            forms: The `forms` of each process, by rank.
        """
        local_sums = self._sums
        self._sums = []
        if self._processes.world_size == 1:
            ((_, total),) = local_sums
            return total
        # Each process adds the nodes of all, as one process would go on from there.
        for rank, (first, end) in enumerate(self._ranges):
            for number, node in enumerate(remaining_nodes(first, end, self._leaves)):
                gradients: Gradients = [None] * len(like)
                if rank == self._processes.rank:
                    gradients = local_sums[number][1]
                columns = zip(gradients, like, forms[rank][number], strict=True)
                self._add_node(node, [_exchanged(*column, rank) for column in columns])
        ((_, total),) = self._sums
        self._sums = []
        return total


def take_gradients(parameters: Sequence[Tensor]) -> Gradients:
    """Take the gradients from parameters, in a form that is the same in all processes.

    A dense one is laid out as its parameter, since the order of a later sum follows the memory. A sparse one has one
    entry for each index.
    """
    gradients: Gradients = []
    for parameter in parameters:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.coalesce()
        elif gradient is not None and gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        gradients.append(gradient)
    return gradients


def give_gradients(parameters: Sequence[Tensor], gradients: Gradients) -> None:
    """Set the gradients of parameters."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def added(left: Gradients, right: Gradients) -> Gradients:
    """Return left plus right, where dense gradients on the left are changed; one that only one of them has is that one.

    At most two numbers are added for each entry of a sparse gradient, so their order does not count.
    """
    sums = [one if one is not None else other for one, other in zip(left, right, strict=True)]
    targets = []
    values = []
    for index, (one, other) in enumerate(zip(left, right, strict=True)):
        if one is None or other is None:
            continue
        if one.is_sparse and other.is_sparse:
            sums[index] = (one + other).coalesce()
            continue
        # A sparse gradient is added to a dense one, whichever is on the left.
        dense, value = sorted((one, other), key=attrgetter("is_sparse"))
        sums[index] = dense
        targets.append(dense)
        values.append(value)
    foreach.add_(targets, values)
    return sums


def _form_of(gradient: Tensor | None) -> Form:
    if gradient is None:
        return None
    if not gradient.is_sparse:
        return ()
    return (gradient.sparse_dim(), gradient.values().size(0))


def _exchanged(gradient: Tensor | None, parameter: Tensor, form: Form, rank: int) -> Tensor | None:
    """Return the gradient of a process, in every process.

    Args:
        gradient: The gradient in that process; None in others.
        parameter: The parameter.
        form: The form of the gradient.
        rank: The rank of the process.
    """
    if form is None:
        return None
    # 1. A dense gradient.
    if not form:
        if gradient is None:
            gradient = torch.empty_like(parameter)
        return _from_rank(gradient, rank)

    # 2. The indices and the values of a sparse one.
    dimensions, entries = form
    if gradient is None:
        indices = torch.empty(dimensions, entries, dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty(entries, *parameter.shape[dimensions:])
    else:
        indices = gradient.indices()
        values = gradient.values()
    indices = _from_rank(indices, rank)
    values = _from_rank(values, rank)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, is_coalesced=True)


def _from_rank(tensor: Tensor, rank: int) -> Tensor:
    """Return the tensor of a process, in every process."""
    # A broadcast sends memory in its order; where a copy is sent, it is copied back.
    sent = tensor.detach().contiguous()
    dist.broadcast(sent, rank)
    if sent.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(sent)
    return tensor
