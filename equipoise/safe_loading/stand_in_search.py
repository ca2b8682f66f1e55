"""Search nested containers for stand-ins, to name those in a checkpoint.

The content of a file is not trusted: it may be nested deeply, hold itself, or have keys of any length.
"""

import collections
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy

from equipoise.safe_loading.stand_in import StandIn, class_in_place_of

__all__ = ["stand_ins_in"]

# The search ends after as many.
_MOST_STAND_INS = 1000
# Longest path to a stand-in: the last keys are named.
_MOST_KEYS = 20
# Characters of a key that are printed.
_LONGEST_KEY = 200


def stand_ins_in(value: Any) -> dict[str, str]:
    """Return the paths to stand-ins in nested containers, with the names of their classes.

    Args:
        value: Dictionaries, lists, tuples, sets and arrays of objects; other objects are not searched.

    Example:
        >>> stand_ins_in({"mine": [1, StandIn("torch.nn", "ReLU")]})
        {"['mine'][1]": 'torch.nn.ReLU'}
    """
    if isinstance(value, StandIn):
        return {"": class_in_place_of(value)}
    class_names: dict[str, str] = {}
    for container, key, item in _walk(value):
        if isinstance(item, StandIn):
            class_names[_path_to(container, key)] = class_in_place_of(item)
            if len(class_names) == _MOST_STAND_INS:
                break
    return class_names


class _Container(NamedTuple):
    """A container that is searched.

    Attributes:
        value: The container itself.
        parent: The container that holds it; None: the search began with it.
        key: Its key or index in the parent.
    """

    value: Any
    parent: "_Container | None"
    key: Any


def _walk(value: Any) -> Iterator[tuple[_Container, Any, Any]]:
    """Yield the items of nested containers, level by level: the container, the key and the item."""
    # A container may hold itself, or one container many times.
    visited = {id(value)}
    pending = collections.deque([_Container(value, None, None)])
    while pending:
        container = pending.popleft()
        for key, item in _items_of(container.value):
            yield container, key, item
            if _is_container(item) and id(item) not in visited:
                visited.add(id(item))
                pending.append(_Container(item, container, key))


def _is_container(value: Any) -> bool:
    if isinstance(value, dict | list | tuple | set | frozenset):
        return True
    return _is_array_of_objects(value)


def _is_array_of_objects(value: Any) -> bool:
    return isinstance(value, numpy.ndarray) and value.dtype.kind == "O"


def _items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the items of a container with their keys or indices; none for another object."""
    if isinstance(value, dict):
        return value.items()
    if _is_array_of_objects(value):
        return enumerate(value.flat)
    if _is_container(value):
        return enumerate(value)
    return ()


def _path_to(container: _Container, key: Any) -> str:
    """Return the keys that lead to an item; the first of very many are left out."""
    # 1. The keys from the item to the top.
    keys = [key]
    above = container
    while above.parent is not None:
        if len(keys) == _MOST_KEYS:
            keys.append(...)
            break
        keys.append(above.key)
        above = above.parent

    # 2. The same from the top to the item.
    return "".join(f"[{_format_key(item)}]" for item in reversed(keys))


def _format_key(key: Any) -> str:
    """Return a key as a program writes it, if that is short for certain."""
    if isinstance(key, str | bytes) and len(key) > _LONGEST_KEY:
        return f"{key[:_LONGEST_KEY]!r}..."
    if key is None or key is ... or isinstance(key, str | bytes | float):
        return repr(key)
    if isinstance(key, int) and key.bit_length() < 64:
        return repr(key)
    return f"a {type(key).__name__}"
