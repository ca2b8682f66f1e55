"""Leaves of objects: the plain values, generators and further objects to which their attributes and items lead."""

import pickle
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from equipoise.interop.torch.modules import unsaved_buffers_of
from equipoise.parallel.snapshot.generators import generator_state, is_generator
from equipoise.parallel.snapshot.plain.paths import Path, Root, steps_from
from equipoise.parallel.snapshot.plain.values import LARGEST, Content, Contents, memory_of

__all__ = ["Leaf", "Leaves", "own_memory"]

# Longer paths lead through linked objects, such as the nodes of a tree.
_MOST_STEPS = 8


# Plain values that can be changed in place, so that it counts whether two names stand for one of them.
_CHANGEABLE = (dict, list, set, deque, Tensor)


class Leaf(NamedTuple):
    """A value that is noted as one.

    Attributes:
        path: The path to it.
        kind: "values", "generators", "aliases" for further names of a value, or "objects" for what no file can hold and
            what is too large.
        value: The value; of an alias the path to it.
        content: What tells it from another one.
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
    """Follows objects to their leaves."""

    def __init__(self) -> None:
        self._contents = Contents()
        # Of a plain value the path that has led to it, by its identity.
        self._first_paths: dict[int, Path] = {}

    def of(self, roots: Mapping[str, Root]) -> Iterator[Leaf]:
        """Yield the leaves of objects. What is followed further is so once, by the first path that leads to it."""
        visited = _with_own_entries(roots)
        self._contents.own_memory = own_memory(roots)
        self._first_paths.clear()
        for name, root in roots.items():
            # A copy: another thread may set attributes meanwhile.
            for step, value in list(vars(root.value).items()):
                if step in root.left_out:
                    continue
                path = (name, step)
                if not root.objects_only:
                    yield from self._follow(value, path, visited, root.largest)
                elif self._contents.of(value, root.largest) is None:
                    yield _object(path, value)
            if isinstance(root.value, nn.Module):
                yield from self._unsaved_buffers(name, root.value)

    def _unsaved_buffers(self, name: str, module: nn.Module) -> Iterator[Leaf]:
        for buffer_name in unsaved_buffers_of(module):
            buffer = getattr(module, buffer_name)
            content = self._contents.of(buffer, LARGEST)
            if content is None:
                continue
            path = (name, "_buffers", [buffer_name])
            yield Leaf(path, "values", buffer, content)

    def _follow(self, value: Any, path: Path, visited: set[int], largest: int) -> Iterator[Leaf]:
        """Yield the leaves of a value."""
        if isinstance(value, Tensor) and id(value) in visited:
            return
        # 1. A plain value is a leaf. One that is too large for a checkpoint counts as an object.
        content = self._contents.of(value, largest)
        if content is not None:
            first_path = self._first_paths.setdefault(id(value), path)
            if first_path is not path and isinstance(value, _CHANGEABLE):
                yield Leaf(path, "aliases", first_path, Content(first_path))
                return
            kind = "values"
            if content.size > largest:
                kind = "objects"
            yield Leaf(path, kind, value, content)
            return
        # 2. So is a generator, which has a state that a file can hold.
        if is_generator(value):
            state = pickle.dumps(generator_state(value))
            yield Leaf(path, "generators", value, Content(state))
            return
        # 3. An object is followed once, which also ends circles.
        if id(value) in visited:
            return
        visited.add(id(value))
        # 4. What is not followed further is noted as an object.
        steps = steps_from(value)
        if steps is None or len(path) > _MOST_STEPS:
            yield _object(path, value)
            return
        for step, target in steps:
            longer_path = (*path, step)
            yield from self._follow(target, longer_path, visited, largest)


def _object(path: Path, value: Any) -> Leaf:
    """Return the leaf of an object that a file cannot hold: only its class can be compared."""
    class_name = type(value).__qualname__
    return Leaf(path, "objects", value, Content(class_name))


def _with_own_entries(roots: Mapping[str, Root]) -> set[int]:
    """Return the identities of what has an entry of its own in a checkpoint: roots, weights and buffers."""
    identities = set()
    for root in roots.values():
        identities.add(id(root.value))
        if isinstance(root.value, nn.Module):
            identities.update(map(id, root.value.parameters()))
            identities.update(map(id, root.value.buffers()))
    return identities


def own_memory(roots: Mapping[str, Root]) -> frozenset[int | None]:
    """Return the memory of weights and buffers that a checkpoint holds by themselves. Attributes may be views of it."""
    tensors: list[Tensor] = []
    for root in roots.values():
        if isinstance(root.value, nn.Module):
            unsaved = unsaved_buffers_of(root.value)
            tensors += root.value.parameters(recurse=False)
            tensors += [buffer for name, buffer in root.value.named_buffers(recurse=False) if name not in unsaved]
    return frozenset(map(memory_of, tensors)) - {None}
