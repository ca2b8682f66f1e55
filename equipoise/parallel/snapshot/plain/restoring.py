"""The return of changes into the objects of another run, and what cannot return."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.notices import rank_zero_warn
from equipoise.parallel.snapshot.generators import is_generator, set_generator_state
from equipoise.parallel.snapshot.plain.copies import copied
from equipoise.parallel.snapshot.plain.leaves import own_memory
from equipoise.parallel.snapshot.plain.paths import Root, Step, entry_of, find, text_of
from equipoise.parallel.snapshot.plain.state import State
from equipoise.parallel.snapshot.plain.values import memory_of

__all__ = ["differing", "restore"]

_CPU = torch.device("cpu")


def restore(roots: Mapping[str, Root], state: State, device: torch.device) -> None:
    """Bring changes back.

    Args:
        roots: The objects, by the names that they had.
        state: The changes.
        device: The device of tensors that were not on the CPU, if there is none in their place.
    """
    saved = own_memory(roots)
    for path, value, is_elsewhere in state.get("values", ()):
        # The changes may be brought back again: what returns is a copy.
        copy = copied(value, device) if is_elsewhere else copied(value, _CPU)
        container, key = _place(roots, path)
        # Others may refer to the present object, so its contents change rather than the object.
        if container is not None and not _refill(_item(container, key), copy, saved):
            _set(container, key, copy, path)
    for path, first_path in state.get("aliases", ()):
        container, key = _place(roots, path)
        value = find(roots, first_path)
        if container is not None and value is not None:
            _set(container, key, value, path)
    for path, generator_state in state.get("generators", ()):
        generator = find(roots, path)
        if is_generator(generator):
            set_generator_state(generator, generator_state)


def differing(roots: Mapping[str, Root], state: State) -> Iterator[tuple[str, str]]:
    """Yield what changes cannot bring back in the present roots: objects that lack, or are of another class.

    Yields:
        The name of the root, and the place.
    """
    # Each place once, although many changes may belong into one object.
    places: dict[str, str] = {}
    # 1. Objects that lack: values and generators have nowhere to go.
    for kind in ("values", "generators"):
        for path, *_ in state.get(kind, ()):
            path_of_owner = path[:-1]
            if find(roots, path_of_owner) is None:
                place = text_of(path_of_owner)
                places[place] = path[0]
    # 2. Objects that no file holds, and that this run has not created likewise.
    for path, class_name in state.get("objects", ()):
        present = find(roots, path)
        if type(present).__qualname__ != class_name:
            place = text_of(path)
            places[place] = path[0]
    # 3. A root that lacks has been left out by the user.
    for place, name in places.items():
        if name in roots:
            yield name, place


def _place(roots: Mapping[str, Root], path: Sequence[Step]) -> tuple[Any, Any]:
    """Return the container into which a path leads, and the key there; None for both if there is none."""
    *path_of_owner, step = path
    owner = find(roots, path_of_owner)
    if owner is None:
        return None, None
    try:
        return entry_of(owner, step)
    except TypeError:
        # The object has no attributes.
        return owner, step


def _item(container: Any, key: Any) -> Any:
    try:
        return container[key]
    except (LookupError, TypeError):
        return None


def _set(container: Any, key: Any, value: Any, path: Sequence[Step]) -> None:
    """Set an attribute or item, or warn that there is no place for it."""
    # Items of a tuple cannot be replaced.
    if isinstance(container, tuple):
        return
    try:
        container[key] = value
    except (LookupError, TypeError):
        rank_zero_warn(
            f"The resumed run has another object than the checkpoint's run at {text_of(path)}, so what had been"
            " set there is left out. Construct the same objects before `fit`."
        )


def _refill(present: Any, value: Any, saved: frozenset[int | None]) -> bool:
    """Change the contents of a tensor or container, and return whether that was possible."""
    if isinstance(present, Tensor) and isinstance(value, Tensor):
        # A sparse tensor may have another number of entries.
        is_dense = present.layout is value.layout is torch.strided
        is_alike = is_dense and present.shape == value.shape and present.dtype == value.dtype
        # Torch refuses writes to an inference tensor outside of inference mode.
        # A view of a weight is no place for values: the weight has its own.
        if not is_alike or present.is_inference() or memory_of(present) in saved:
            return False
        present.detach().copy_(value)
        return True
    if isinstance(present, dict) and isinstance(value, dict):
        # Containers in it may be attributes, too.
        kept = {
            key: item for key, item in present.items() if _is_container(item) and _refill(item, value.get(key), saved)
        }
        present.clear()
        present.update({**value, **kept})
        return True
    if isinstance(present, set) and isinstance(value, set):
        present.clear()
        present.update(value)
        return True
    if isinstance(present, list | deque) and isinstance(value, list | deque):
        present.clear()
        present.extend(value)
        return True
    return False


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | set | list | deque)
