"""The tensors of a forward that is being recorded, and the calls whose values they are."""

from collections.abc import Iterable
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from equipoise.interop.torch.dispatch import tensors_in

__all__ = ["Facts", "Obstacle", "Sizes", "TensorNodes", "inputs_of", "sizes_of"]


class Obstacle(Exception):
    """Raised where the calls alone would not be the forward."""


class Sizes(IntEnum):
    """Origin of the sizes of a value.

    Attributes:
        FIXED: They follow from the sizes of the network's tensors.
        ASSUMED: They may depend on values, since a submodule that stays whole reads some. Most such submodules return
            fixed sizes, so this is assumed, and checked in each call.
        DYNAMIC: They depend on values.
    """

    FIXED = 0
    ASSUMED = 1
    DYNAMIC = 2


class Facts(NamedTuple):
    """Facts about the value of a call.

    Attributes:
        inputs: Indices of the network's tensors from which it follows.
        is_pure: True if it follows from these alone, by functions without random numbers and changes in place.
        sizes: Origin of its sizes. Default: they follow from those of the network's tensors.
    """

    inputs: frozenset[int]
    is_pure: bool
    sizes: Sizes = Sizes.FIXED


def sizes_of(facts: Iterable[Facts]) -> Sizes:
    """Return the origin of sizes that follow from some values.

    Args:
        facts: The facts about each of these values.
    """
    return max((facts_of_value.sizes for facts_of_value in facts), default=Sizes.FIXED)


def inputs_of(facts: Iterable[Facts]) -> frozenset[int]:
    """Return the indices of the network's tensors from which some values follow.

    Args:
        facts: The facts about each of these values.
    """
    inputs: frozenset[int] = frozenset()
    for facts_of_value in facts:
        inputs |= facts_of_value.inputs
    return inputs


class TensorNodes:
    """Find the call whose value a tensor is.

    Args:
        graph: The graph of the calls.
        root: Its root; the attribute `network` is the network. Other tensors become its attributes.

    Attributes:
        facts: Facts about the value of each call.
    """

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        self._graph = graph
        self._root = root
        self._names = _names_of_tensors(root)
        self._nodes: Any = WeakIdKeyDictionary()
        self.facts: dict[fx.Node, Facts] = {}
        # Storages that were allocated during the recording, by their addresses.
        self._new_storages: set[int] = set()
        # Names of the root's attributes for objects from outside, by the ids of these.
        self._constants: dict[int, str] = {}
        # The objects themselves, so that their ids stay theirs.
        self._constant_values: list[Any] = []

    def add(self, tensor: Tensor, node: fx.Node) -> None:
        """Note that a tensor is the value of a call."""
        self._nodes[tensor] = node

    def find_node(self, tensor: Tensor) -> fx.Node | None:
        """Return the call whose value a tensor is; None for tensors of the network and from outside."""
        node: fx.Node | None = self._nodes.get(tensor)
        # Calls that were removed from the graph have no facts.
        if node is None or node not in self.facts:
            return None
        return node

    def node_of(self, tensor: Tensor) -> fx.Node:
        """Return the call whose value a tensor is; a new one for a tensor of the network or from outside.

        Raises:
            Obstacle: If the tensor is new, and no recorded call computes it.
        """
        node = self.find_node(tensor)
        if node is not None:
            return node
        name = self._names.get(id(tensor))
        if name is not None:
            return self._add_look_up(name)
        self.check_origin(tensor)
        return self.constant(tensor)

    def check_origin(self, tensor: Tensor) -> None:
        """Check that a tensor which is no value of a call is one of the network, or comes from outside.

        Raises:
            Obstacle: If the forward itself has computed or changed it, where it cannot be followed.
        """
        # A call that was removed has changed a tensor that a module did not receive as an argument.
        has_lost_its_call = tensor in self._nodes and self.find_node(tensor) is None
        if has_lost_its_call or _address_of(tensor) in self._new_storages:
            raise Obstacle("uses a tensor that was computed where it cannot be followed")

    def constant(self, value: Any) -> fx.Node:
        """Return a call that looks up an object from outside."""
        value_id = id(value)
        name = self._constants.get(value_id)
        if name is None:
            count = len(self._constants)
            name = f"constant_{count}"
            self._constants[value_id] = name
            self._constant_values.append(value)
            # A parameter that is no part of the network does not become a part of it.
            vars(self._root)[name] = value
        return self._add_look_up(name)

    def _add_look_up(self, name: str) -> fx.Node:
        """Add a call that looks up an attribute of the root, and return it."""
        node = self._graph.create_node("get_attr", name)
        # Its values may be others in the next call.
        facts = Facts(frozenset(), is_pure=False)
        self.facts[node] = facts
        return node

    def forget(self, nodes: Iterable[fx.Node]) -> None:
        """Forget calls that are removed from the graph."""
        for node in nodes:
            self.facts.pop(node, None)

    def note_change(self, tensor: Tensor) -> None:
        """Note that a tensor was changed in place: it and its views no longer follow from the network's tensors."""
        address = _address_of(tensor)
        entries = list(self._nodes.items())
        for recorded_tensor, node in entries:
            facts = self.facts.get(node)
            if facts is None:
                continue
            if _address_of(recorded_tensor) == address:
                self.facts[node] = facts._replace(is_pure=False)

    def note_operation(self, result: Any, args: Any) -> None:
        """Note the storages that an operation allocates.

        Args:
            result: Result of the operation.
            args: Its arguments.
        """
        addresses_of_arguments = {_address_of(tensor) for tensor in tensors_in(args)}
        for tensor in tensors_in(result):
            address = _address_of(tensor)
            # A tensor without storage has the address 0.
            if address and address not in addresses_of_arguments:
                self._new_storages.add(address)


def _names_of_tensors(root: nn.Module) -> dict[int, str]:
    """Return the name of each parameter, buffer and other tensor that is an attribute of a module, by its id."""
    names: dict[int, str] = {}
    for path, module in root.named_modules():
        # 1. Collect the tensors of the module itself.
        parameters = module.named_parameters(recurse=False)
        buffers = module.named_buffers(recurse=False)
        attributes: list[tuple[str, Tensor]] = [*parameters, *buffers]
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                attributes.append((name, value))

        # 2. A tensor of several modules has the name in the first one.
        prefix = ""
        if path:
            prefix = f"{path}."
        for name, tensor in attributes:
            names.setdefault(id(tensor), f"{prefix}{name}")
    return names


def _address_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none."""
    is_strided = tensor.layout is torch.strided
    if not is_strided or tensor.device.type == "meta":
        return 0
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr()
    except (NotImplementedError, RuntimeError):
        # Wrappers, such as those of torch.func, have no storage.
        return 0
