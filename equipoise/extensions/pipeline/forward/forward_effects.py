"""Side effects of a forward, which its recorded calls would not have."""

from collections import deque
from operator import is_
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

    def describe(self, module: nn.Module, *, kept_only: bool = False) -> str:
        """Return the first change as a predicate, such as "sets the attribute 'x' of Block"; empty if there is none.

        Args:
            module: The module in which to look, with its submodules.
            kept_only: Whether only changes count that a later forward would find as another object: of an attribute,
                or of a container in one. Default: False.
        """
        for submodule in module.modules():
            noted = self._noted.get(id(submodule))
            # Modules that did not exist before the forward have no state to compare with.
            if noted is None:
                continue
            change = noted.describe_change(kept_only=kept_only)
            if change:
                return change
        if not kept_only and self._generators.have_moved():
            return "draws random numbers that decide what it does"
        return ""


class _NotedModule:
    """Attributes and buffers of a module, without those of its submodules."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # The objects in attributes and buffers.
        self._attributes = Attributes([module])
        self._attributes.mark()
        self._buffers = Attributes([module], buffers_of)
        self._buffers.mark()
        # The items of lists and the like.
        self._items: dict[str, list[Any]] = {}
        for name, value in vars(module).items():
            is_container = type(value) in _CONTAINERS
            if is_container and name not in _OF_EVERY_MODULE:
                self._items[name] = _items_of(value)
        # The values of buffers.
        self._noted_buffers = note_buffers(module)

    def describe_change(self, *, kept_only: bool) -> str:
        """Return the first change as a predicate; empty if there is none."""
        kind = type(self._module).__name__

        # 1. Other objects in attributes and buffers.
        changed_attribute = self._attributes.first_change()
        if changed_attribute is not None:
            return f"{SETS_ATTRIBUTE} {changed_attribute[1]!r} of {kind}"
        changed_buffer = self._buffers.first_change()
        if changed_buffer is not None:
            return f"sets the buffer {changed_buffer[1]!r} of {kind}"

        # 2. Other items in the same lists and the like.
        for name, earlier_items in self._items.items():
            container = vars(self._module).get(name)
            items = _items_of(container)
            has_same_length = len(items) == len(earlier_items)
            if not has_same_length or not all(map(is_, items, earlier_items)):
                return f"changes the {type(container).__name__} {name!r} of {kind}"

        # 3. Other values in the same buffers.
        for noted in self._noted_buffers:
            if noted.has_changed() and not kept_only:
                return f"changes the buffer {noted.name!r} of {kind}"
        return ""


def _items_of(container: Any) -> list[Any]:
    """Return the items of a container: of a dictionary its keys, then its values. None has no items."""
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return list(container or ())
