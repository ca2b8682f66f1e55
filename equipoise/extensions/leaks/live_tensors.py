"""Live tensors of the process, and the age of the graphs that they keep."""

import gc
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import Tensor

__all__ = ["GraphAges", "LiveTensors", "find_live_tensors", "storage_bytes"]

_MOST_NODES = 50_000
# Rounds that a node must outlive to count as old.
_OLD = 2
# Number of instances: each has a key of its own, since nodes may outlive a run.
_INSTANCES = count()


class GraphAges:
    """Ages of graphs' nodes, in rounds of counting.

    A node that the present step has left behind may still be released, so only older nodes count.

    Attributes:
        rounds: Number of rounds so far.
    """

    def __init__(self) -> None:
        self.rounds = 0
        # Key in a node's metadata for the first round in which it was counted.
        self._key = f"equipoise.look.{next(_INSTANCES)}"

    def exclude_present(self) -> None:
        """Exclude all present graphs: their nodes never count as old."""
        with_graph = [thing for thing in gc.get_objects() if type(thing) is Tensor and thing.grad_fn is not None]
        for node in _nodes_of(with_graph):
            node.metadata[self._key] = math.inf

    def begin_round(self) -> None:
        """Begin a round."""
        self.rounds += 1

    def count_old(self, tensors: Iterable[Tensor]) -> int:
        """Return the number of old nodes in the graphs of tensors; note the new ones."""
        old = 0
        for node in _nodes_of(tensors):
            first_round = node.metadata.setdefault(self._key, self.rounds)
            if self.rounds - first_round >= _OLD:
                old += 1
        return old


@dataclass
class LiveTensors:
    """Tensors that Python objects keep alive.

    Attributes:
        with_graph: Tensors with a graph.
        nodes: Number of old nodes in their graphs.
        plain: Tensors without a graph.
    """

    with_graph: list[Tensor]
    nodes: int
    plain: list[Tensor]

    @property
    def plain_bytes(self) -> int:
        """Bytes of the tensors without a graph."""
        return storage_bytes(self.plain)


def find_live_tensors(objects: Iterable[object], ages: GraphAges) -> LiveTensors:
    """Find the tensors among objects, and begin a round of counting their nodes.

    Parameters and tensors of other classes are left out.

    Args:
        objects: The objects, such as those of `gc.get_objects()`. An object may appear twice.
        ages: Ages of the graphs' nodes.
    """
    ages.begin_round()
    tensors: dict[int, Tensor] = {}
    for thing in objects:
        # `isinstance` would include parameters, and run code of proxies.
        if type(thing) is Tensor:
            tensors[id(thing)] = thing
    with_graph = []
    plain = []
    for tensor in tensors.values():
        if tensor.grad_fn is None:
            plain.append(tensor)
        else:
            with_graph.append(tensor)
    return LiveTensors(with_graph, ages.count_old(with_graph), plain)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors' storages; a shared storage counts once."""
    storages = {}
    for tensor in tensors:
        try:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        except (NotImplementedError, RuntimeError):
            # The tensor is sparse, or without memory of its own.
            continue
    return sum(storages.values())


def _nodes_of(tensors: Iterable[Tensor]) -> set[Any]:
    """Return the nodes of the graphs of tensors, up to a maximum."""
    nodes: set[Any] = set()
    queue: list[Any] = [tensor.grad_fn for tensor in tensors]
    while queue and len(nodes) < _MOST_NODES:
        node = queue.pop()
        # An input without a gradient has no node.
        if node is None or node in nodes:
            continue
        nodes.add(node)
        for next_node, _ in node.next_functions:
            queue.append(next_node)
    return nodes
