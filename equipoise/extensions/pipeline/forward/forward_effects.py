"""Side effects of a forward, which its recorded calls would not have."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from equipoise.interop.torch.modules import buffers_of
from equipoise.parallel.snapshot.attributes import Attributes
from equipoise.parallel.snapshot.buffers import note_buffers
from equipoise.parallel.snapshot.random_state import HostGenerators

__all__ = ["SETS_ATTRIBUTE", "ForwardEffects"]

# The beginning of a change that some libraries make in the first call alone.
SETS_ATTRIBUTE = "sets the attribute"

_CONTAINERS = (list, dict, set, deque)
# Attributes of the libraries' own.
_OF_EVERY_MODULE = {*vars(nn.Module()), *vars(LightningModule())}


class ForwardEffects:
    """Notice what a forward changes beside its output: attributes, buffers, and generators outside of torch.

    Args:
        network: The module; its buffers are copied.

    Example:
        >>> module = nn.BatchNorm1d(2)
        >>> effects = ForwardEffects(module)
        >>> module.num_batches_tracked += 1
        >>> effects.describe(module)
        "changes the buffer 'num_batches_tracked' of BatchNorm1d"
        >>> effects.accept(module)
        >>> effects.describe(module)
        ''
    """

    def __init__(self, network: nn.Module) -> None:
        # The state of each module, by the module's id.
        self._noted: dict[int, _NotedModule] = {}
        self._first_attributes = Attributes(network.modules())
        self._first_attributes.mark()
        self.accept(network)

    def accept(self, module: nn.Module) -> None:
        """Ignore all changes of a module and of its submodules until now, and numbers drawn until now."""
        for submodule in module.modules():
            self._noted[id(submodule)] = _NotedModule(submodule)
        self._generators = HostGenerators()

    def attribute_changes(self) -> list[tuple[nn.Module, str]]:
        """Return all modules and names of attributes that have changed since the beginning, whether accepted or not."""
        return self._first_attributes.changes()

    def describe(self, module: nn.Module) -> str:
        """Return the first change as a predicate, such as "sets the attribute 'x' of Block"; empty if there is none.

        Args:
            module: The module in which to look, with its submodules.
        """
        for noted in self._noted_among(module):
            change = noted.describe_change()
            if change:
                return change
        if self._generators.have_moved():
            return "draws random numbers that decide what it does"
        return ""

    def describe_kept(self, module: nn.Module) -> str:
        """Return the first change that a later forward would find: of an attribute, or of a container in one.

        Args:
            module: The module in which to look, with its submodules.
        """
        for noted in self._noted_among(module):
            change = noted.describe_kept()
            if change:
                return change
        return ""

    def _noted_among(self, module: nn.Module) -> Iterator["_NotedModule"]:
        """Yield the noted states of a module and its submodules."""
        for submodule in module.modules():
            noted = self._noted.get(id(submodule))
            # Modules that did not exist before the forward have no state to compare with.
            if noted is not None:
                yield noted


class _NotedModule:
    """Attributes and buffers of a module, without those of its submodules."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # The objects in attributes and buffers.
        self._attributes = Attributes([module])
        self._attributes.mark()
        self._buffers = Attributes([module], buffers_of)
        self._buffers.mark()
        # The contents of lists and the like.
        self._contents = _contents_of(module)
        # The values of buffers.
        self._noted_buffers = note_buffers(module)

    def describe_change(self) -> str:
        """Return the first change as a predicate; empty if there is none."""
        change = self.describe_kept()
        if change:
            return change
        for noted in self._noted_buffers:
            if noted.has_changed():
                return f"changes the buffer {noted.name!r} of {type(noted.module).__name__}"
        return ""

    def describe_kept(self) -> str:
        """Return the first change but those of values in the same buffers; empty if there is none."""
        # 1. Other objects in attributes and buffers.
        changed_attribute = self._attributes.first_change()
        if changed_attribute is not None:
            module, name = changed_attribute
            return f"{SETS_ATTRIBUTE} {name!r} of {type(module).__name__}"
        changed_buffer = self._buffers.first_change()
        if changed_buffer is not None:
            module, name = changed_buffer
            return f"sets the buffer {name!r} of {type(module).__name__}"

        # 2. Other contents of the same lists and the like.
        attributes = vars(self._module)
        for name, earlier_items in self._contents.items():
            container = attributes.get(name)
            if not _are_same(_items_of(container), earlier_items):
                kind = type(container).__name__
                return f"changes the {kind} {name!r} of {type(self._module).__name__}"
        return ""


def _contents_of(module: nn.Module) -> dict[str, list[Any]]:
    """Return the items of the containers in a module's attributes, by the attributes' names."""
    contents: dict[str, list[Any]] = {}
    for name, value in vars(module).items():
        is_container = type(value) in _CONTAINERS
        if is_container and name not in _OF_EVERY_MODULE:
            contents[name] = _items_of(value)
    return contents


def _items_of(container: Any) -> list[Any]:
    """Return the items of a container: of a dictionary its keys, then its values. None has no items."""
    if container is None:
        return []
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return list(container)


def _are_same(items: Sequence[Any], earlier_items: Sequence[Any]) -> bool:
    """Return True if two lists have the same objects."""
    if len(items) != len(earlier_items):
        return False
    pairs = zip(items, earlier_items, strict=True)
    return all(item is earlier_item for item, earlier_item in pairs)
