"""Snapshot of the containers of a batch, so that a step can run again on the same batch.

Steps take entries out of a batch (`labels = batch.pop("labels")`) or put some in. No tensor is copied, and the
containers stay the same objects: whoever holds the batch finds in it what it held before.
"""

from collections import deque
from collections.abc import Iterator, MutableMapping
from dataclasses import fields, is_dataclass
from operator import is_
from typing import Any

__all__ = ["BatchContents"]

_NOTHING = object()  # stands for a field without a value


class BatchContents:
    """Note what a nested batch holds, and bring it back.

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
        self._noted = list(_noted(batch))

    def restore(self) -> None:
        """Bring the contents back; containers that hold the same as before are not touched."""
        for container, held in self._noted:
            now = _held_by(container)
            if len(now) != len(held) or not all(map(is_, now, held)):
                _fill(container, held)

    def now(self) -> "BatchContents":
        """Return what the same containers hold now, also those that were taken out of the batch."""
        present = BatchContents(None)
        present._noted = [(container, _held_by(container)) for container, _ in self._noted]
        return present


def _noted(value: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yield every container that can be changed, with what it holds."""
    if isinstance(value, tuple):
        held = list(value)
    elif isinstance(value, (MutableMapping, list, deque)) or (is_dataclass(value) and not isinstance(value, type)):
        held = _held_by(value)
        yield value, held
    else:
        return
    for item in held:
        yield from _noted(item)


def _held_by(container: Any) -> list[Any]:
    """Return the keys and then the values of a mapping, the items of a list, the values of a dataclass's fields."""
    if isinstance(container, MutableMapping):
        return [*container.keys(), *container.values()]
    if isinstance(container, (list, deque)):
        return list(container)
    return [getattr(container, field.name, _NOTHING) for field in fields(container)]


def _fill(container: Any, held: list[Any]) -> None:
    """Let a container hold what it held before."""
    if isinstance(container, MutableMapping):
        container.clear()
        half = len(held) // 2
        for key, value in zip(held[:half], held[half:], strict=True):
            container[key] = value
    elif isinstance(container, (list, deque)):
        container.clear()
        container.extend(held)
    else:
        for field, value in zip(fields(container), held, strict=True):
            if value is not _NOTHING:
                object.__setattr__(container, field.name, value)  # the dataclass may be frozen
