"""The recorded calls of a forward: their facts, their places in the network, and the tensors that they compute."""

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from equipoise.extensions.pipeline.forward.operation_traits import Traits
from equipoise.extensions.pipeline.forward.user_lines import line_of_user
from equipoise.extensions.pipeline.graph.output_structure import items_of_output
from equipoise.extensions.pipeline.graph.traced import STAYS
from equipoise.extensions.pipeline.recording.tensor_nodes import Facts, Sizes, TensorNodes, inputs_of, sizes_of
from equipoise.interop.torch.modules import versions
from equipoise.tree import tensors_in

__all__ = ["ArgumentVersions", "Computed", "RecordedCalls"]

# The modules in whose forwards a call is, by their paths, the outermost first.
Place = Mapping[str, type[nn.Module]]


class Computed(NamedTuple):
    """Value and effects of a call.

    Attributes:
        result: Its value.
        changed: Arguments that it has changed in place.
        traits: Traits of the operations that it has run.
        is_pure: True if it does nothing but compute its value from its arguments.
    """

    result: Any
    changed: Sequence[Tensor]
    traits: Traits
    is_pure: bool = False


class ArgumentVersions:
    """Notice which arguments of a call are changed in place.

    Args:
        arguments: Nested arguments.
    """

    def __init__(self, arguments: Any) -> None:
        self.tensors = list(tensors_in(arguments, items_of_output))
        # One by one: tensors of inference mode have no version, and do not change outside of it.
        self._before = [versions([tensor]) for tensor in self.tensors]

    def changed(self) -> list[Tensor]:
        """Return the tensors that have changed."""
        pairs = zip(self.tensors, self._before, strict=True)
        return [tensor for tensor, before in pairs if versions([tensor]) != before]


class RecordedCalls:
    """Note what is known about each recorded call.

    Args:
        graph: The graph of the calls.
        tensors: The calls that compute tensors.
        device: Device of the recording.

    Attributes:
        changes: For each call that changed arguments in place, the values that it changed.
    """

    def __init__(self, graph: fx.Graph, tensors: TensorNodes, device: torch.device) -> None:
        self.changes: dict[fx.Node, set[fx.Node]] = {}
        self._graph = graph
        self._tensors = tensors
        self._device = device

    @property
    def count(self) -> int:
        """Number of calls."""
        return len(self._graph.nodes)

    def remove_since(self, count: int) -> None:
        """Remove the calls after the first `count`."""
        nodes = list(self._graph.nodes)
        removed = nodes[count:]
        # Torch erases no call that a later one uses.
        for node in reversed(removed):
            self._graph.erase_node(node)
        self._tensors.forget(removed)
        for node in removed:
            self.changes.pop(node, None)

    def finish(self, node: fx.Node, computed: Computed, place: Place) -> None:
        """Note facts about a call, its place in the network, and the tensors that it computes.

        Args:
            node: The call.
            computed: What it has computed.
            place: The modules in whose forwards it is.
        """
        # 1. Facts and place.
        facts = self._facts_of(node, computed)
        self._describe(node, facts, place)

        # 2. Changes.
        if computed.changed:
            self.changes[node] = self._changed_values(node, computed.changed)
        for tensor in computed.changed:
            self._tensors.note_change(tensor)

        # 3. Values.
        changed_ids = {id(tensor) for tensor in computed.changed}
        self._assign(node, computed.result, changed_ids)

    def _changed_values(self, node: fx.Node, changed: Sequence[Tensor]) -> set[fx.Node]:
        """Return the values that a call has changed in place."""
        arguments = node.all_input_nodes
        values: set[fx.Node] = set()
        for tensor in changed:
            value = self._tensors.find_node(tensor)
            if value is not None:
                values.add(value)
                continue
            # A tensor of the network or from outside, which the call has looked up.
            values.update(argument for argument in arguments if argument.op == "get_attr")
        # A tensor may be in a container that another call has built.
        if not values or not values.issubset(arguments):
            return set(arguments)
        return values

    def _facts_of(self, node: fx.Node, computed: Computed) -> Facts:
        """Return the facts about the value of a call, which follow from those about its arguments."""
        facts_of_arguments = [self._tensors.facts[argument] for argument in node.all_input_nodes]
        has_pure_arguments = all(facts.is_pure for facts in facts_of_arguments)
        is_random = Traits.RANDOM in computed.traits
        is_pure = computed.is_pure and not computed.changed and not is_random
        sizes = sizes_of(facts_of_arguments)
        if Traits.DYNAMIC in computed.traits:
            # A submodule that reads values rarely returns other sizes; its sizes are checked in each call.
            sizes_of_call = Sizes.DYNAMIC
            if node.op == "call_module":
                sizes_of_call = Sizes.ASSUMED
            sizes = max(sizes, sizes_of_call)
        return Facts(
            inputs_of(facts_of_arguments),
            is_pure=is_pure and has_pure_arguments,
            sizes=sizes,
        )

    def _describe(self, node: fx.Node, facts: Facts, place: Place) -> None:
        """Note facts about a call, the line that makes it, and the modules in whose forwards it is."""
        self._tensors.facts[node] = facts
        # No variable holds the frame: it would keep itself alive, and with it the tensors of the call.
        node.meta["line"] = line_of_user(inspect.currentframe())
        # The form of torch.fx, which has the path twice.
        module_stack = {path: (path, kind) for path, kind in place.items()}
        node.meta["nn_module_stack"] = module_stack

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
            if not _has_tensors(item):
                continue
            node.meta[STAYS] = True
            item_node = self._graph.call_function(take_out, (node, key))
            facts = self._tensors.facts[node]
            self._tensors.facts[item_node] = facts
            for name in ("line", "nn_module_stack"):
                item_node.meta[name] = node.meta[name]
            self._assign(item_node, item, changed_ids)


def _has_tensors(value: Any) -> bool:
    tensors = tensors_in(value, items_of_output)
    return any(True for _ in tensors)


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
