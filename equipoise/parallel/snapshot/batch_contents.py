"""Snapshot of the containers of a batch, so that a step can run again on the same batch.

Steps take entries out of a batch (`labels = batch.pop("labels")`) or put some in. No tensor is copied, and the
containers stay the same objects: every reference to the batch has the same contents afterwards as before.
"""

from collections import deque
from collections.abc import MutableMapping
from dataclasses import fields, is_dataclass
from operator import is_
from typing import Any

from torch import Tensor

__all__ = ["BatchContents"]

# Stands for a field without a value.
_MISSING = object()


class BatchContents:
    """Note the contents of a nested batch, and restore them.

    Mappings, lists, deques and dataclasses are noted, also inside of tuples.

    Args:
        batch: A nested batch.

    Example:
        >>> batch = {"x": [1, 2], "y": 3}
        >>> contents = BatchContents(batch)
        >>> batch.pop("y"), batch["x"].pop()
        (3, 2)
        >>> contents.restore()
        >>> batch
        {'x': [1, 2], 'y': 3}
    """

    def __init__(self, batch: Any) -> None:
        # Every container with its items, the outer ones first.
        self._contents = _containers_in(batch)

    def restore(self) -> None:
        """Restore the contents. Containers that have not changed are not touched."""
        for container, items in self._contents:
            present = _items_of(container)
            same = len(present) == len(items)
            if same:
                same = all(map(is_, present, items))
            if not same:
                _fill(container, items)

    def now(self) -> "BatchContents":
        """Return the present contents of the same containers, also of those that were removed from the batch."""
        present = BatchContents(None)
        for container, _ in self._contents:
            present._contents.append((container, _items_of(container)))
        return present


def _containers_in(batch: Any) -> list[tuple[Any, list[Any]]]:
    """Return every mutable container in a batch, with its items."""
    containers = []
    # A batch may contain itself.
    seen = set()
    # The list grows while it is read.
    values = [batch]
    for value in values:
        # Most values are tensors, and `isinstance` with MutableMapping is slow.
        if isinstance(value, Tensor):
            continue
        if isinstance(value, tuple):
            values.extend(value)
        elif id(value) not in seen and _is_mutable_container(value):
            seen.add(id(value))
            items = _items_of(value)
            containers.append((value, items))
            values.extend(items)
    return containers


def _is_mutable_container(value: Any) -> bool:
    if isinstance(value, (MutableMapping, list, deque)):
        return True
    return is_dataclass(value) and not isinstance(value, type)


def _items_of(container: Any) -> list[Any]:
    """Return the keys and then the values of a mapping, the items of a list, the values of a dataclass's fields."""
    if isinstance(container, MutableMapping):
        return [*container.keys(), *container.values()]
    if isinstance(container, (list, deque)):
        return list(container)
    return [getattr(container, field.name, _MISSING) for field in fields(container)]


def _fill(container: Any, items: list[Any]) -> None:
    """Replace the contents of a container by items that `_items_of` returned."""
    if isinstance(container, MutableMapping):
        container.clear()
        half = len(items) // 2
        for key, value in zip(items[:half], items[half:], strict=True):
            container[key] = value
    elif isinstance(container, (list, deque)):
        container.clear()
        container.extend(items)
    else:
        pairs = zip(fields(container), items, strict=True)
        for field, value in pairs:
            if value is not _MISSING:
                # The dataclass may be frozen.
                object.__setattr__(container, field.name, value)
