"""Sums of gradients in the order of a fixed tree, whichever process computes which parts.

The leaves of the tree are the parts of a step, in their order. A node is the sum of its two children, left plus right,
or its only child. A process adds what lies within its parts; the nodes that remain are exchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.interop.torch import foreach
from equipoise.parallel.communication.processes import Processes

__all__ = ["GradientTree", "Node", "remaining_nodes"]

# Gradients of the parameters, in their order; None where a parameter has none.
Gradients = list[Tensor | None]


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
                gradients = _added(left, gradients)
                node = node.parent
            else:
                break
        self._sums.append((node, gradients))

    def masks(self) -> list[list[bool]]:
        """Return which parameters have a gradient, for each sum of this process; other processes need to know it."""
        return [[gradient is not None for gradient in gradients] for _, gradients in self._sums]

    def total(self, like: Sequence[Tensor], masks: Sequence[list[list[bool]]]) -> Gradients:
        """Return the sum over all parts of all processes, the same in each of them, and begin the next step.

        Args:
            like: The parameters.
            masks: The `masks` of each process, by rank.
        """
        own = self._sums
        self._sums = []
        if self._processes.world_size == 1:
            ((_, total),) = own
            return total
        for rank, (first, end) in enumerate(self._ranges):
            for number, node in enumerate(remaining_nodes(first, end, self._leaves)):
                gradients = _empty_like(like, masks[rank][number])
                if rank == self._processes.rank:
                    gradients = own[number][1]
                self._add_node(node, _from_rank(gradients, rank))
        ((_, total),) = self._sums
        self._sums = []
        return total


def _added(left: Gradients, right: Gradients) -> Gradients:
    """Return left plus right; a gradient that only one of them has is that one."""
    targets = []
    values = []
    for one, other in zip(left, right, strict=True):
        if one is not None and other is not None:
            targets.append(one)
            values.append(other)
    foreach.add_(targets, values)
    return [one if one is not None else other for one, other in zip(left, right, strict=True)]


def _empty_like(parameters: Sequence[Tensor], mask: Sequence[bool]) -> Gradients:
    """Return memory for the gradients of another process."""
    return [torch.empty_like(each) if is_there else None for each, is_there in zip(parameters, mask, strict=True)]


def _from_rank(gradients: Gradients, rank: int) -> Gradients:
    """Return the gradients of a process, in every process."""
    for gradient in gradients:
        if gradient is not None:
            dist.broadcast(gradient, rank)
    return gradients
