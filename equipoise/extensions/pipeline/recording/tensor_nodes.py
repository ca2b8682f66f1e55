"""The tensors of a forward that is being recorded, and the calls whose values they are."""

from collections.abc import Iterable
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from equipoise.interop.torch.dispatch import tensors_in

__all__ = ["Facts", "Obstacle", "Sizes", "TensorNodes", "address_of", "combined"]


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
        inputs: Indices of the network's tensors from which it follows. Default: none.
        is_pure: True if it follows from these alone, by functions without random numbers and changes in place.
            Default: False.
        sizes: Origin of its sizes. Default: they follow from those of the network's tensors.
    """

    inputs: frozenset[int] = frozenset()
    is_pure: bool = False
    sizes: Sizes = Sizes.FIXED


def combined(facts: Iterable[Facts]) -> Facts:
    """Return the facts about a value that follows from others alone, of which these are the facts."""
    inputs: frozenset[int] = frozenset()
    is_pure = True
    sizes = Sizes.FIXED
    for facts_of_value in facts:
        inputs |= facts_of_value.inputs
        is_pure = is_pure and facts_of_value.is_pure
        sizes = max(sizes, facts_of_value.sizes)
    return Facts(inputs, is_pure, sizes)


class TensorNodes:
    """Find the call whose value a tensor is.

    Args:
        graph: The graph of the calls.
        root: Its root; the attribute `network` is the network. Other tensors become its attributes.

    Attributes:
        facts: Facts about the values of calls. Of others nothing is known.
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

    def add(self, tensor: Tensor, node: fx.Node) -> None:
        """Note that a tensor is the value of a call."""
        self._nodes[tensor] = node

    def find_node(self, tensor: Tensor) -> fx.Node | None:
        """Return the call whose value a tensor is; None for tensors of the network and from outside."""
        node: fx.Node | None = self._nodes.get(tensor)
        return node

    def facts_of(self, node: fx.Node | None) -> Facts:
        """Return the facts about the value of a call; those of an unknown value for None."""
        if node is None:
            return Facts()
        return self.facts.get(node, Facts())

    def facts_of_arguments(self, node: fx.Node) -> Facts:
        """Return the facts that follow from those about the arguments of a call."""
        return combined(map(self.facts_of, node.all_input_nodes))

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
            return self._graph.create_node("get_attr", name)
        self.check_origin(tensor)
        return self.constant(tensor)

    def check_origin(self, tensor: Tensor) -> None:
        """Check that a tensor which is no value of a call is one of the network, or comes from outside.

        Raises:
            Obstacle: If the forward itself has computed it, where it cannot be followed.
        """
        if address_of(tensor) in self._new_storages:
            raise Obstacle("uses a tensor that was computed where it cannot be followed")

    def constant(self, value: Any) -> fx.Node:
        """Return a call that looks up an object from outside."""
        value_id = id(value)
        # A parameter that is no part of the network does not become a part of it.
        attributes = vars(self._root)
        name = self._constants.get(value_id)
        if name is None:
            name = f"constant_{len(self._constants)}"
            self._constants[value_id] = name
            attributes[name] = value
        return self._graph.create_node("get_attr", name)

    def note_change(self, tensor: Tensor) -> None:
        """Note that a tensor was changed in place: it and its views no longer follow from the network's tensors."""
        address = address_of(tensor)
        entries = list(self._nodes.items())
        for recorded_tensor, node in entries:
            if address_of(recorded_tensor) == address:
                self.facts[node] = self.facts_of(node)._replace(is_pure=False)

    def note_operation(self, result: Any, args: Any) -> None:
        """Note the storages that an operation allocates.

        Args:
            result: Result of the operation.
            args: Its arguments.
        """
        addresses_of_arguments = {address_of(tensor) for tensor in tensors_in(args)}
        for tensor in tensors_in(result):
            address = address_of(tensor)
            # A tensor without storage has the address 0.
            if address and address not in addresses_of_arguments:
                self._new_storages.add(address)


def _names_of_tensors(root: nn.Module) -> dict[int, str]:
    """Return the name of each parameter, buffer and other tensor that is an attribute of a module, by its id."""
    names: dict[int, str] = {}
    for path, module in root.named_modules():
        # 1. Collect the tensors of the module itself.
        parameters = module.named_parameters(recurse=False)
        attributes: list[tuple[str, Tensor]] = [*parameters, *module.named_buffers(recurse=False)]
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                attributes.append((name, value))

        # 2. A tensor of several modules has the name in the first one.
        prefix = f"{path}." if path else ""
        for name, tensor in attributes:
            names.setdefault(id(tensor), prefix + name)
    return names


def address_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none."""
    is_strided = tensor.layout is torch.strided
    if not is_strided or tensor.device.type == "meta":
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        # Wrappers, such as those of torch.func, have no storage.
        return 0
