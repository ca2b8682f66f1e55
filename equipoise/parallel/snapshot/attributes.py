"""Snapshots of attributes: the objects that they name, and the contents of containers among these objects."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

__all__ = ["Attributes", "Containers"]

# Names and values of the attributes of an object.
Namespace = dict[str, Any]

_CONTAINERS = (list, dict, set, deque)


class Attributes:
    """Notes the names and values of attributes, and restores them.

    An object in an attribute may be changed in place, as by `self.outputs.append(...)`: that stays.

    Args:
        holders: The objects.
        namespace_of: Returns the dictionary of names and values of an object. Default: `vars`, its attributes.

    Example:
        >>> module = nn.Identity()
        >>> attributes = Attributes([module])
        >>> attributes.mark()
        >>> module.size = 3
        >>> attributes.first_change()
        (Identity(), 'size')
        >>> attributes.restore()
        >>> hasattr(module, "size")
        False
    """

    def __init__(
        self,
        holders: Iterable[Any],
        namespace_of: Callable[[Any], Namespace] = vars,
    ) -> None:
        self._holders = list(holders)
        self._namespace_of = namespace_of
        # The noted names and values, for each holder.
        self._values: list[Namespace] = []

    def mark(self) -> None:
        """Note the present values."""
        self._values = [dict(self._namespace_of(holder)) for holder in self._holders]

    def first_change(self) -> tuple[Any, str] | None:
        """Return the first object with a name that is new or names another object than at the mark, and that name.

        Returns:
            The object and the name; None if there is no change. Names that were removed are no change.
        """
        changes = self.changes()
        return changes[0] if changes else None

    def changes(self) -> list[tuple[Any, str]]:
        """Return all objects and names that `first_change` could return."""
        changes = []
        for holder, values in zip(self._holders, self._values, strict=True):
            namespace = self._namespace_of(holder)
            for name, value in namespace.items():
                if name not in values or value is not values[name]:
                    changes.append((holder, name))
        return changes

    def restore(self) -> None:
        """Restore names and values, and their order."""
        for holder, values in zip(self._holders, self._values, strict=True):
            namespace = self._namespace_of(holder)
            # All together: a name that was removed comes back to its place.
            namespace.clear()
            namespace.update(values)


class Containers:
    """Notes the contents of lists, dictionaries, sets and deques in public attributes of modules, and restores them.

    Args:
        module: The module; its submodules count, too.

    Example:
        >>> module = nn.Identity()
        >>> module.seen = [1]
        >>> containers = Containers(module)
        >>> containers.mark()
        >>> module.seen.append(2)
        >>> containers.restore()
        >>> module.seen
        [1]
    """

    def __init__(self, module: nn.Module) -> None:
        self._containers: list[Any] = []
        # A copy of each container.
        self._contents: list[Any] = []
        for submodule in module.modules():
            self._add_containers_of(submodule)

    def _add_containers_of(self, submodule: nn.Module) -> None:
        attributes = vars(submodule)
        for name, value in attributes.items():
            # Private containers are torch's and Lightning's.
            if name.startswith("_"):
                continue
            # Subclasses may do more than hold items.
            if type(value) in _CONTAINERS:
                self._containers.append(value)

    def mark(self) -> None:
        """Note the present contents."""
        self._contents = [container.copy() for container in self._containers]

    def have_changed(self) -> bool:
        """Return True if a container has other items than at the mark, or has them in another order."""
        pairs = zip(self._containers, self._contents, strict=True)
        return any(_identities(container) != _identities(content) for container, content in pairs)

    def restore(self) -> None:
        """Restore the contents. The containers remain the same objects."""
        for container, content in zip(self._containers, self._contents, strict=True):
            container.clear()
            if isinstance(container, list | deque):
                container.extend(content)
            else:
                container.update(content)


def _identities(container: Any) -> list[int]:
    identities = list(map(id, container.values() if isinstance(container, dict) else container))
    return sorted(identities) if isinstance(container, set) else identities
