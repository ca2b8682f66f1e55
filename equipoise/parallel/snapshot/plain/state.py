"""State of objects as plain data: what has changed in them since a mark, and its return into other objects.

Objects are followed through their attributes and the items of their containers to leaves: plain values, generators, and
objects that a file cannot hold, of which only the class is noted. A leaf is known by the steps that lead to it.
"""

import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset, Sampler

from equipoise.interop.torch.modules import unsaved_buffers_of
from equipoise.parallel.snapshot.generators import generator_state, is_generator, set_generator_state
from equipoise.parallel.snapshot.plain.values import LARGEST, Contents, copied, put

__all__ = ["PlainState", "Root", "State", "differing", "restore"]

# A step is the name of an attribute, or a list with the key of an item.
Step = Any
Path = tuple[Step, ...]
# Entries of the changed leaves, by kind; each begins with the path.
State = dict[str, list[list[Any]]]

# Packages whose objects are not followed: they hold what is created anew, and have states of their own.
_NOT_FOLLOWED = frozenset({"torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "equipoise"})
# Containers with more items that are not plain hold data.
_MOST_ITEMS = 1000
_MOST_STEPS = 8
_CPU = torch.device("cpu")


class Root(NamedTuple):
    """An object that is followed.

    Attributes:
        value: The object.
        left_out: Names of attributes that are not followed.
        objects_only: Whether its plain values and generators are left out.
        largest: Bytes of a value up to which it is noted.
    """

    value: Any
    left_out: frozenset[str] = frozenset()
    objects_only: bool = False
    largest: int = LARGEST


class _Leaf(NamedTuple):
    path: Path
    kind: str
    value: Any
    content: Any
    size: int = 0
    has_tensors: bool = False
    is_elsewhere: bool = False


class PlainState:
    """Notes the state of objects, tells what has changed since then, and brings changes back.

    Tensors count as changed when they are written to or replaced; other values when they differ.

    Example:
        >>> class Curriculum: level = 1
        >>> curriculum = Curriculum()
        >>> state = PlainState()
        >>> state.mark({"data": Root(curriculum)})
        >>> curriculum.level = 2
        >>> changes = state.changes({"data": Root(curriculum)})
        >>> changes["values"]
        [[['data', 'level'], 2, False]]
        >>> resumed = Curriculum()
        >>> restore({"data": Root(resumed)}, changes, torch.device("cpu"))
        >>> resumed.level
        2
    """

    def __init__(self) -> None:
        self._contents = Contents()
        self._noted: dict[str, tuple[str, Any]] = {}

    def mark(self, roots: Mapping[str, Root]) -> None:
        """Note the present state of objects, by their names."""
        self._noted.update({repr(leaf.path): (leaf.kind, leaf.content) for leaf in self._leaves(roots)})

    def mark_but_tensors(self, roots: Mapping[str, Root]) -> None:
        """Note the state anew; values with tensors that have changed since the mark still count as changed."""
        for leaf in self._leaves(roots):
            key = repr(leaf.path)
            noted = (leaf.kind, leaf.content)
            if not leaf.has_tensors:
                self._noted[key] = noted
            elif self._noted.get(key) != noted:
                self._noted.pop(key, None)

    def changes(self, roots: Mapping[str, Root]) -> State:
        """Return what has changed since the mark, as copies on the CPU.

        Returns:
            Under "values" paths, values, and whether tensors in them were on another device than the CPU; under
            "generators" paths and states; under "objects" paths and names of classes, for what no file can hold or
            what is too large.
        """
        state: State = {"values": [], "generators": [], "objects": []}
        for leaf in self._leaves(roots):
            if self._noted.get(repr(leaf.path)) == (leaf.kind, leaf.content):
                continue
            path = list(leaf.path)
            if leaf.kind == "values":
                state["values"].append([path, copied(leaf.value), leaf.is_elsewhere])
            elif leaf.kind == "generators":
                state["generators"].append([path, generator_state(leaf.value)])
            else:
                state["objects"].append([path, type(leaf.value).__qualname__])
        return state

    def _leaves(self, roots: Mapping[str, Root]) -> Iterator[_Leaf]:
        seen = {id(root.value) for root in roots.values()}
        for root in roots.values():
            if isinstance(root.value, nn.Module):
                # Weights and buffers have entries of their own.
                seen.update(map(id, root.value.parameters()), map(id, root.value.buffers()))
        for name, root in roots.items():
            for step, value in _namespace(root):
                if not root.objects_only:
                    yield from self._follow(value, (name, step), seen, root.largest)
                elif self._contents.of(value, root.largest) is None:
                    yield _Leaf((name, step), "objects", value, type(value).__qualname__)
            if isinstance(root.value, nn.Module):
                yield from self._unsaved_buffers(name, root.value)

    def _unsaved_buffers(self, name: str, module: nn.Module) -> Iterator[_Leaf]:
        for buffer_name in unsaved_buffers_of(module):
            buffer = getattr(module, buffer_name)
            content = self._contents.of(buffer, LARGEST)
            if content is not None:
                yield _Leaf((name, "_buffers", [buffer_name]), "values", buffer, *content)

    def _follow(self, value: Any, path: Path, seen: set[int], largest: int) -> Iterator[_Leaf]:
        """Yield the leaves of a value."""
        is_shared = not isinstance(value, str | int | float | bool | bytes | None)
        if is_shared and id(value) in seen:
            return
        content = self._contents.of(value, largest)
        if is_shared:
            seen.add(id(value))
        if content is not None:
            kind = "values" if content.size <= largest else "objects"
            yield _Leaf(path, kind, value, *content)
        elif is_generator(value):
            yield _Leaf(path, "generators", value, pickle.dumps(generator_state(value)))
        else:
            steps = _steps_from(value)
            if steps is None or len(path) > _MOST_STEPS:
                yield _Leaf(path, "objects", value, type(value).__qualname__)
                return
            for step, target in steps:
                yield from self._follow(target, (*path, step), seen, largest)


def _namespace(root: Root) -> list[tuple[Step, Any]]:
    return [(name, value) for name, value in vars(root.value).items() if name not in root.left_out]


def _steps_from(value: Any) -> list[tuple[Step, Any]] | None:
    """Return items or attributes of a value, with the steps to them; None if it is not followed."""
    if isinstance(value, dict | list | tuple):
        if len(value) > _MOST_ITEMS:
            return None
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [([key], item) for key, item in items if isinstance(key, str | int)]
    kind = type(value)
    package = kind.__module__.split(".")[0]
    is_known = isinstance(value, nn.Module | Dataset | Sampler | SimpleNamespace)
    if not is_known and (package in _NOT_FOLLOWED or package in sys.stdlib_module_names):
        return None
    try:
        # Runs no property and no code of a proxy.
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return list(attributes.items()) if isinstance(attributes, dict) else None


def restore(roots: Mapping[str, Root], state: State, device: torch.device) -> None:
    """Bring changes back.

    Args:
        roots: The objects, by the names that they had.
        state: The changes.
        device: Where tensors go that were not on the CPU, if there is none in their place.

    """
    for path, value, is_elsewhere in state.get("values", ()):
        owner = _find(roots, path[:-1])
        if owner is not None:
            put(owner, path[-1], copied(value, device if is_elsewhere else _CPU))
    for path, value in state.get("generators", ()):
        generator = _find(roots, path)
        if is_generator(generator):
            set_generator_state(generator, value)


def differing(roots: Mapping[str, Root], state: State) -> Iterator[tuple[str, str]]:
    """Yield what changes cannot bring back in the present roots: objects that lack, or are of another class.

    Yields:
        The name of the root, and the place.
    """
    places: dict[str, str] = {}
    for path, *_ in [*state.get("values", ()), *state.get("generators", ())]:
        if _find(roots, path[:-1]) is None:
            places[_place(path[:-1])] = path[0]
    for path, kind in state.get("objects", ()):
        if type(_find(roots, path)).__qualname__ != kind:
            places[_place(path)] = path[0]
    for place, name in places.items():
        if name in roots:
            yield name, place


def _find(roots: Mapping[str, Root], path: Sequence[Step]) -> Any:
    """Return the object at a place; None if there is none."""
    name, *steps = path
    if name not in roots:
        return None
    value = roots[name].value
    for step in steps:
        try:
            value = value[step[0]] if isinstance(step, list) else vars(value)[step]
        except (LookupError, TypeError):
            return None
    return value


def _place(path: Sequence[Step]) -> str:
    """Return a path as the user would write it."""
    name, *steps = path
    texts = [f"[{step[0]!r}]" if isinstance(step, list) else f".{step}" for step in steps]
    return f"{name}{''.join(texts)}"
