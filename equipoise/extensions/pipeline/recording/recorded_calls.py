"""The recorded calls of a forward: their facts, their places in the network, and the tensors that they compute."""

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from equipoise.extensions.pipeline.forward.operation_traits import Traits
from equipoise.extensions.pipeline.forward.user_lines import line_of_user
from equipoise.extensions.pipeline.graph.traced import STAYS
from equipoise.extensions.pipeline.recording.tensor_nodes import Facts, Sizes, TensorNodes, address_of
from equipoise.tree import tensors_in

__all__ = ["Computed", "Place", "RecordedCalls"]

# The modules in whose forwards a call is, the outermost first, as torch.fx notes them: {path: (path, class)}.
Place = Mapping[str, tuple[str, type[nn.Module]]]


class Computed(NamedTuple):
    """Value and effects of a call.

    Attributes:
        result: Its value.
        arguments: The tensors among its arguments.
        changed: Those that it has changed in place.
        traits: Traits of the operations that it has run.
        is_pure: True if it does nothing but compute its value from its arguments.
        keeps_sizes: True if its value is a tensor that it has changed, whose sizes do not follow from other tensors.
    """

    result: Any
    arguments: Sequence[Tensor]
    changed: Sequence[Tensor]
    traits: Traits
    is_pure: bool = False
    keeps_sizes: bool = False

    @property
    def viewed(self) -> list[Tensor]:
        """The arguments that share their memory with the value."""
        addresses = {address_of(tensor) for tensor in tensors_in(self.result)}
        # Tensors without storage share nothing.
        addresses.discard(0)
        return [tensor for tensor in self.arguments if address_of(tensor) in addresses]


class RecordedCalls:
    """Notes facts about each recorded call.

    Args:
        graph: The graph of the calls.
        tensors: The calls that compute tensors.
        device: Device of the recording.

    Attributes:
        changes: For each call that changed arguments in place, the calls whose values it changed.
    """

    def __init__(self, graph: fx.Graph, tensors: TensorNodes, device: torch.device) -> None:
        self.changes: dict[fx.Node, set[fx.Node]] = {}
        # For each call those of whose values its own is a view.
        self._viewed: dict[fx.Node, set[fx.Node]] = {}
        self._graph = graph
        self._tensors = tensors
        self._device = device

    def finish(self, node: fx.Node, computed: Computed, place: Place) -> None:
        """Note facts about a call, its place in the network, and the tensors that it computes.

        Args:
            node: The call.
            computed: Its value and effects.
            place: The modules in whose forwards it is.
        """
        # 1. Facts and place.
        self._tensors.facts[node] = self._facts_of(node, computed)
        # No variable holds the frame: it would keep itself alive, and with it the tensors of the call.
        node.meta["line"] = line_of_user(inspect.currentframe())
        node.meta["nn_module_stack"] = place

        # 2. Memory. What changes a view also changes the values that it shows.
        self._viewed[node] = self._nodes_sharing(node, computed.viewed)
        if computed.changed:
            self.changes[node] = self._nodes_sharing(node, computed.changed)
        for tensor in computed.changed:
            self._tensors.note_change(tensor)

        # 3. Values.
        self._assign(node, computed.result, {id(tensor) for tensor in computed.changed})

    def _nodes_sharing(self, node: fx.Node, tensors: Sequence[Tensor]) -> set[fx.Node]:
        """Return the calls whose values may share the memory of some tensors, which a call receives.

        A tensor that no call has computed was looked up, and may be the value of each look-up among the arguments. A
        tensor that is no argument by itself lies in a container, which may be each of the arguments.
        """
        if not tensors:
            return set()
        arguments = set(node.all_input_nodes)
        nodes: set[fx.Node] = set()
        for tensor in tensors:
            computed_by = self._tensors.find_node(tensor)
            if computed_by is None:
                nodes.update(argument for argument in arguments if argument.op == "get_attr")
            else:
                nodes.add(computed_by)
        if not nodes or not nodes <= arguments:
            nodes |= arguments
        return nodes.union(*(self._viewed.get(viewing, set()) for viewing in nodes))

    def _facts_of(self, node: fx.Node, computed: Computed) -> Facts:
        """Return the facts about the value of a call, which follow from those about its arguments."""
        facts = self._tensors.facts_of_arguments(node)
        if Traits.RANDOM in computed.traits or computed.changed or not computed.is_pure:
            facts = facts._replace(is_pure=False)
        if Traits.DYNAMIC in computed.traits:
            # A submodule that reads values rarely returns other sizes; its sizes are checked in each call.
            sizes_of_call = Sizes.DYNAMIC
            if node.op == "call_module":
                sizes_of_call = Sizes.ASSUMED
            facts = facts._replace(sizes=max(facts.sizes, sizes_of_call))
        if computed.keeps_sizes and isinstance(computed.result, Tensor):
            changed_node = self._tensors.find_node(computed.result)
            facts = facts._replace(sizes=self._tensors.facts_of(changed_node).sizes)
        return facts

    def _assign(self, node: fx.Node, value: Any, changed_ids: set[int]) -> None:
        """Note which tensors a call computes, with a call for each item of a container."""
        # 1. A tensor is the value of the first call that computes it, or of the last one that changes it.
        if isinstance(value, Tensor):
            is_new = self._tensors.find_node(value) is None
            if is_new or id(value) in changed_ids:
                self._tensors.add(value, node)
            if value.device != self._device:
                node.meta[STAYS] = True
            return

        # 2. A container needs a call for each item with tensors.
        for take_out, key, item in _items_with_keys(value):
            if next(tensors_in(item), None) is None:
                continue
            node.meta[STAYS] = True
            item_node = self._graph.call_function(take_out, (node, key))
            self._tensors.facts[item_node] = self._tensors.facts_of(node)
            self._viewed[item_node] = self._viewed[node]
            for name in ("line", "nn_module_stack"):
                item_node.meta[name] = node.meta[name]
            self._assign(item_node, item, changed_ids)


def _items_with_keys(value: Any) -> Iterator[tuple[Callable[..., Any], Any, Any]]:
    """Yield for each item of a container the function that takes it out, its key, and the item.

    The containers are those of `tree.items_of`; another value, such as None, has no items.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield operator.getitem, key, item
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield operator.getitem, index, item
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield getattr, field.name, getattr(value, field.name)
