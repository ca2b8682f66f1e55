"""Leaves of objects: the plain values, generators and further objects to which their attributes and items lead."""

import pickle
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from itertools import count
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn

from equipoise.interop.torch.modules import buffers_of, children_of, unsaved_buffers_of
from equipoise.parallel.snapshot.generators import generator_state, is_generator
from equipoise.parallel.snapshot.plain.paths import Path, Root, attributes_of, steps_from
from equipoise.parallel.snapshot.plain.values import LARGEST, Content, Contents, memory_of

__all__ = ["Leaf", "Leaves", "description_of", "own_memory"]

# Longer paths lead through linked objects, such as the nodes of a tree.
_MOST_STEPS = 8

# Plain values that can be changed in place, so that it counts whether two names stand for one of them.
_CHANGEABLE = (dict, list, set, deque, Tensor)
# Values that their texts describe in full.
_DESCRIBED = (Enum, date, time, timedelta, Decimal, Fraction, range, slice, count, int, float, complex, str, bytes)


class Leaf(NamedTuple):
    """A value that is noted as one.

    Attributes:
        path: The path to it.
        kind: "values", "generators", "aliases" for further names of a value or object, or "objects" for what no file
            can hold and what is too large.
        value: The value.
        content: What tells it from another one; of an alias the first path to it.
    """

    path: Path
    kind: str
    value: Any
    content: Content

    @property
    def mark(self) -> tuple[str, Any]:
        """Kind and digest, which differ from earlier ones where the leaf has changed."""
        return self.kind, self.content.digest


class Leaves:
    """Follows objects through attributes and items to their leaves."""

    def __init__(self) -> None:
        self._contents = Contents()
        # The paths that have led to values and objects, by the identities of these.
        self._first_paths: dict[int, Path] = {}

    def of(self, roots: Mapping[str, Root]) -> Iterator[Leaf]:
        """Yield the leaves of objects. What is followed further is so once, by the first path that leads to it."""
        self._contents.own_memory = own_memory(roots)
        self._first_paths = _with_own_entries(roots)
        for name, root in roots.items():
            # A copy: another thread may set attributes meanwhile.
            for step, value in attributes_of(root.value) or ():
                if step in root.left_out:
                    continue
                path = (name, step)
                if not root.objects_only:
                    yield from self._follow(value, path, root.largest)
                elif self._contents.of(value, root.largest) is None:
                    yield _object(path, value)
            yield _object((name,), root.value)
            if isinstance(root.value, nn.Module):
                yield from self._registered(name, root.value)

    def _registered(self, name: str, module: nn.Module) -> Iterator[Leaf]:
        """Yield the buffers of a module that its `state_dict` leaves out, and its children."""
        for buffer_name in unsaved_buffers_of(module):
            buffer = buffers_of(module).get(buffer_name)
            content = self._contents.of(buffer, LARGEST)
            if content is not None and buffer_name in buffers_of(module):
                yield Leaf((name, "_buffers", [buffer_name]), "values", buffer, content)
        for child_name, child in children_of(module).items():
            leaf = _object((name, "_modules", [child_name]), child)
            # A layer with weights is known by itself: another one of its class has others, which no optimiser has.
            if child is not None and next(child.parameters(), None) is not None:
                leaf = leaf._replace(content=Content((leaf.content.digest, self._contents.number_of(child))))
            yield leaf

    def _follow(self, value: Any, path: Path, largest: int) -> Iterator[Leaf]:
        """Yield the leaves of a value."""
        first_path = self._first_paths.setdefault(id(value), path)
        # Another path has led to it before.
        is_known = first_path is not path
        if isinstance(value, Tensor) and len(first_path) == 1:
            return
        # 1. A plain value is a leaf. One that is too large for a checkpoint counts as an object.
        content = self._contents.of(value, largest)
        if content is not None:
            if is_known and isinstance(value, _CHANGEABLE):
                yield Leaf(path, "aliases", value, Content(first_path))
                return
            kind = "values"
            if content.size > largest:
                kind = "objects"
            yield Leaf(path, kind, value, content)
            return
        # 2. So is a generator, which has a state that a file can hold.
        if is_generator(value):
            state = generator_state(value)
            # A pickled tensor has its address beside its elements.
            if isinstance(state, Tensor):
                state = state.tolist()
            yield Leaf(path, "generators", value, Content(pickle.dumps(state)))
            return
        # 3. An object is followed once, which also ends circles.
        if is_known and not isinstance(value, _DESCRIBED):
            yield Leaf(path, "aliases", value, Content(first_path))
            return
        # 4. Of an object its class is noted, and then what it leads to.
        yield _object(path, value)
        if isinstance(value, _DESCRIBED) or len(path) > _MOST_STEPS:
            return
        for step, target in steps_from(value) or ():
            yield from self._follow(target, (*path, step), largest)


def description_of(value: Any) -> str:
    """Return what is compared of a value that a file cannot hold: its class, and what tells it from others of that."""
    name = type(value).__qualname__
    if isinstance(value, _DESCRIBED):
        return f"{name} {value!r}"
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return f"{name} {value.__qualname__}"
    # No path leads to their items.
    if isinstance(value, set | frozenset | dict) and any(not isinstance(key, str | int) for key in value):
        return f"{name} {_text_of_items(value)}"
    return name


def _text_of_items(container: Any) -> str:
    """Return the items of a set or dictionary as a text, or their number if the texts of some do not describe them."""
    items = container
    parts = container
    if isinstance(container, dict):
        items = container.items()
        parts = [*container, *container.values()]
    if all(isinstance(part, _DESCRIBED) for part in parts):
        return str(sorted(map(repr, items)))
    return f"of {len(container)}"


def _object(path: Path, value: Any) -> Leaf:
    """Return the leaf of an object that a file cannot hold: only its description can be compared."""
    return Leaf(path, "objects", value, Content(description_of(value)))


def _with_own_entries(roots: Mapping[str, Root]) -> dict[int, Path]:
    """Return paths to what has an entry of its own in a checkpoint, by identity: roots, their weights and buffers."""
    paths: dict[int, Path] = {}
    for name, root in roots.items():
        paths[id(root.value)] = (name,)
        if isinstance(root.value, nn.Module):
            paths.update((id(tensor), (name,)) for tensor in (*root.value.parameters(), *root.value.buffers()))
    return paths


def own_memory(roots: Mapping[str, Root]) -> frozenset[int | None]:
    """Return the memory of weights and buffers that a checkpoint holds by themselves. Attributes may be views of it."""
    tensors: list[Tensor] = []
    for root in roots.values():
        if isinstance(root.value, nn.Module):
            unsaved = unsaved_buffers_of(root.value)
            tensors += root.value.parameters(recurse=False)
            tensors += [buffer for name, buffer in root.value.named_buffers(recurse=False) if name not in unsaved]
    return frozenset(map(memory_of, tensors)) - {None}
