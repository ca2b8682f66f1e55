"""The recorded calls of a forward: their facts, their places in the network, and the tensors that they compute."""

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from equipoise.extensions.pipeline.forward.operation_traits import Traits
from equipoise.extensions.pipeline.forward.user_lines import line_of_user
from equipoise.extensions.pipeline.graph.traced import STAYS
from equipoise.extensions.pipeline.recording.tensor_nodes import Facts, Sizes, TensorNodes, address_of
from equipoise.tree import tensors_in

__all__ = ["Computed", "Place", "RecordedCalls"]

# The modules in whose forwards a call is, by their paths, the outermost first. torch.fx has the path twice.
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
        changes: For each call that changed arguments in place, the values that it changed.
    """

    def __init__(self, graph: fx.Graph, tensors: TensorNodes, device: torch.device) -> None:
        self.changes: dict[fx.Node, set[fx.Node]] = {}
        # For each call the values of which its own is a view.
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
        self._viewed[node] = self._values_among(node, computed.viewed)
        if computed.changed:
            self.changes[node] = self._values_among(node, computed.changed)
        for tensor in computed.changed:
            self._tensors.note_change(tensor)

        # 3. Values.
        self._assign(node, computed.result, {id(tensor) for tensor in computed.changed})

    def _values_among(self, node: fx.Node, tensors: Sequence[Tensor]) -> set[fx.Node]:
        """Return the values that are some of a call's tensors, and those of which they are views."""
        if not tensors:
            return set()
        # 1. A tensor that is no value is one of the network or from outside, which the call has looked up.
        arguments = set(node.all_input_nodes)
        values: set[fx.Node] = set()
        for tensor in tensors:
            value = self._tensors.find_node(tensor)
            if value is None:
                values.update(argument for argument in arguments if argument.op == "get_attr")
            else:
                values.add(value)
        # 2. A tensor may be in a container that another call has built.
        if not values or not values <= arguments:
            values |= arguments
        viewed: set[fx.Node] = set()
        for value in values:
            viewed |= self._viewed.get(value, set())
        return values | viewed

    def _facts_of(self, node: fx.Node, computed: Computed) -> Facts:
        """Return the facts about the value of a call, which follow from those about its arguments."""
        facts = self._tensors.facts_of_arguments(node)
        has_effects = Traits.RANDOM in computed.traits or computed.changed or not computed.is_pure
        if has_effects:
            facts = facts._replace(is_pure=False)
        if Traits.DYNAMIC in computed.traits:
            # A submodule that reads values rarely returns other sizes; its sizes are checked in each call.
            sizes_of_call = Sizes.DYNAMIC
            if node.op == "call_module":
                sizes_of_call = Sizes.ASSUMED
            facts = facts._replace(sizes=max(facts.sizes, sizes_of_call))
        if computed.keeps_sizes and isinstance(computed.result, Tensor):
            value = self._tensors.find_node(computed.result)
            facts = facts._replace(sizes=self._tensors.facts_of(value).sizes)
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
    """Yield for each item of a container the function that takes it out, its key, and the item."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield operator.getitem, key, item
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield operator.getitem, index, item
    else:
        for name, item in vars(value).items():
            yield getattr, name, item
