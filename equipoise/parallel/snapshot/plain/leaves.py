"""Leaves of objects: the plain values, generators and further objects to which their attributes and items lead."""

import pickle
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from equipoise.interop.torch.modules import unsaved_buffers_of
from equipoise.parallel.snapshot.generators import generator_state, is_generator
from equipoise.parallel.snapshot.plain.paths import Path, Root, steps_from
from equipoise.parallel.snapshot.plain.values import LARGEST, Content, Contents

__all__ = ["Leaf", "Leaves"]

# Longer paths lead through linked objects, such as the nodes of a tree.
_MOST_STEPS = 8
# Python may share such values between places that have nothing to do with each other.
_SHARED_BY_PYTHON = (str, int, float, bool, bytes, type(None))


class Leaf(NamedTuple):
    """A value that is noted as one.

    Attributes:
        path: The path to it.
        kind: "values", "generators", or "objects" for what no file can hold and what is too large.
        value: The value.
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

    def of(self, roots: Mapping[str, Root]) -> Iterator[Leaf]:
        """Yield the leaves of objects, each of them once, by the first path that leads to it."""
        visited = _with_own_entries(roots)
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
        # 1. An object is followed once, which also ends circles.
        if not isinstance(value, _SHARED_BY_PYTHON):
            if id(value) in visited:
                return
            visited.add(id(value))
        # 2. A plain value is a leaf. One that is too large for a checkpoint counts as an object.
        content = self._contents.of(value, largest)
        if content is not None:
            kind = "values"
            if content.size > largest:
                kind = "objects"
            yield Leaf(path, kind, value, content)
            return
        # 3. So is a generator, which has a state that a file can hold.
        if is_generator(value):
            state = pickle.dumps(generator_state(value))
            yield Leaf(path, "generators", value, Content(state))
            return
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
