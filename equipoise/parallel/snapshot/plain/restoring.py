"""The return of changes into the objects of another run, and what cannot return."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import partial
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equipoise.parallel.snapshot.generators import is_generator, set_generator_state
from equipoise.parallel.snapshot.plain.copies import Copies, copied
from equipoise.parallel.snapshot.plain.leaves import description_of, own_memory
from equipoise.parallel.snapshot.plain.paths import Root
from equipoise.parallel.snapshot.plain.places import delete, find, put, text_of
from equipoise.parallel.snapshot.plain.state import PlainState, State, saved_objects, saved_values
from equipoise.parallel.snapshot.plain.values import memory_of

__all__ = ["differing", "restore"]

# Characters of a description in a message.
_LONGEST_TEXT = 60

_CPU = torch.device("cpu")


def restore(roots: Mapping[str, Root], state: State, device: torch.device) -> None:
    """Bring changes back.

    Args:
        roots: The objects, by the names that they had.
        state: The changes.
        device: The device of tensors that were not on the CPU, if there is none in their place.
    """
    _restore_values(roots, state, device)
    for path, first_path in state.get("aliases", ()):
        value = find(roots, first_path)
        if value is not None:
            put(roots, path, value)
    for path, generator_state in state.get("generators", ()):
        generator = find(roots, path)
        if is_generator(generator):
            set_generator_state(generator, generator_state)
    for saved in saved_objects(state):
        member = _member(find(roots, saved.path), saved.description)
        if member is not None:
            put(roots, saved.path, member)
    # The last items of a list come first.
    for (path,) in reversed(state.get("deleted", ())):
        delete(roots, path)


def differing(roots: Mapping[str, Root], state: State, present_run: PlainState) -> Iterator[tuple[str, str]]:
    """Yield what changes cannot bring back in the present roots: objects that lack, or are others.

    Args:
        roots: The objects, by the names that they had.
        state: The changes.
        present_run: The state of the present run when it began.

    Yields:
        The name of the root, and the place.
    """
    # The root's name of each place, once, although many changes may belong into one object.
    names: dict[str, str] = {}
    # 1. Objects that lack: values and generators have nowhere to go.
    for kind in ("values", "generators"):
        for path, *_ in state.get(kind, ()):
            path_of_owner = path[:-1]
            if find(roots, path_of_owner) is None:
                names[text_of(path_of_owner)] = path[0]
    # 2. Objects that no file holds, and that this run has not created likewise.
    for saved in saved_objects(state):
        present = find(roots, saved.path)
        is_described = description_of(present) == saved.description or _member(present, saved.description) is not None
        # A module had been replaced by another one of its class, and this run still has the first one.
        is_the_first = isinstance(present, nn.Module) and present_run.has_noted(saved.path, present)
        if not is_described or (saved.was_replaced and is_the_first):
            place = text_of(saved.path)
            names.pop(place, None)
            names[f"{place} ({shorten(saved.description, _LONGEST_TEXT)})"] = saved.path[0]
    # 3. A root that lacks has been left out by the user.
    for place, name in names.items():
        if name in roots:
            yield name, place


class _Target(NamedTuple):
    """An object that stays, and takes the contents of a saved one.

    Attributes:
        present: The object.
        value: The saved value for which it stands.
        device: The device of the tensors in it.
    """

    present: Any
    value: Any
    device: torch.device


def _restore_values(roots: Mapping[str, Root], state: State, device: torch.device) -> None:
    memory_of_weights = own_memory(roots)
    values = list(saved_values(state))
    devices = [device if saved.is_elsewhere else _CPU for saved in values]
    # 1. Others may refer to an object that had been changed in place, so it stays, and stands for the saved one.
    targets: dict[int, _Target] = {}
    for saved, here in zip(values, devices, strict=True):
        if not saved.was_replaced:
            _add_target(_Target(find(roots, saved.path), saved.value, here), targets, memory_of_weights)
    # This adds more of them.
    for target in list(targets.values()):
        _add_items(target, targets, memory_of_weights)
    # Of several objects that could stand for one value the first does.
    copies: Copies = {id(target.value): (target.value, target.present) for target in reversed(targets.values())}
    for target in targets.values():
        _fill(target.present, target.value, partial(copied, device=target.device, copies=copies))
    # 2. The others. The changes may be brought back again, so what returns is a copy.
    for saved, here in zip(values, devices, strict=True):
        copy = copied(saved.value, here, copies)
        if copy is not find(roots, saved.path):
            put(roots, saved.path, copy)


def _member(present: Any, description: str) -> Enum | None:
    """Return the member of the present value's enumeration that is described; None if there is none."""
    if not isinstance(present, Enum):
        return None
    return next((member for member in type(present) if description_of(member) == description), None)


def _add_target(candidate: _Target, targets: dict[int, _Target], memory_of_weights: frozenset[int | None]) -> None:
    """Add an object if it can take the contents of the saved value."""
    if _is_alike(candidate.present, candidate.value, memory_of_weights):
        targets.setdefault(id(candidate.present), candidate)


def _add_items(parent: _Target, targets: dict[int, _Target], memory_of_weights: frozenset[int | None]) -> None:
    """Add the containers in a dictionary, which may be attributes, too."""
    if isinstance(parent.present, dict) and isinstance(parent.value, dict):
        for key, item in parent.present.items():
            if not isinstance(item, Tensor):
                candidate = _Target(item, parent.value.get(key), parent.device)
                _add_target(candidate, targets, memory_of_weights)
                _add_items(candidate, targets, memory_of_weights)


def _is_alike(present: Any, value: Any, memory_of_weights: frozenset[int | None]) -> bool:
    """Return whether a tensor or container can take the contents of a saved one."""
    if isinstance(present, Tensor) and isinstance(value, Tensor):
        # A sparse tensor may have another number of entries.
        is_dense = present.layout is value.layout is torch.strided
        is_alike = is_dense and present.shape == value.shape and present.dtype == value.dtype
        # Torch refuses writes to an inference tensor outside of inference mode.
        # A view of a weight is no place for values: the weight has its own.
        return is_alike and not present.is_inference() and memory_of(present) not in memory_of_weights
    kinds: tuple[Any, ...] = (dict, set, list | deque)
    return any(isinstance(present, kind) and isinstance(value, kind) for kind in kinds)


def _fill(present: Any, value: Any, copied_item: Callable[[Any], Any]) -> None:
    """Change the contents of a tensor or container to those of a saved one."""
    if isinstance(present, Tensor):
        present.detach().copy_(value)
    elif isinstance(present, dict):
        items = {key: copied_item(item) for key, item in value.items()}
        present.clear()
        present.update(items)
    else:
        contents = list(map(copied_item, value))
        present.clear()
        if isinstance(present, set):
            present.update(contents)
        else:
            present.extend(contents)
