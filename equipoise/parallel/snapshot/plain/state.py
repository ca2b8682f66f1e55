"""State of objects as plain data: what has changed in them since a mark.

Objects are followed through their attributes and the items of their containers to leaves: plain values, generators, and
objects that a file cannot hold, of which only the class is noted. A leaf is known by the path that leads to it.
"""

from collections.abc import Collection, Iterator, Mapping
from enum import Enum, auto
from typing import Any, NamedTuple

from equipoise.parallel.snapshot.generators import generator_state
from equipoise.parallel.snapshot.plain.copies import Copies, copied
from equipoise.parallel.snapshot.plain.leaves import Leaves, description_of
from equipoise.parallel.snapshot.plain.paths import Path, Root

__all__ = ["UNKNOWN", "Noted", "PlainState", "SavedObject", "SavedValue", "State", "saved_objects", "saved_values"]

# Entries of the changed leaves, by kind; each begins with the path.
State = dict[str, list[list[Any]]]


class _Start(Enum):
    """A start that was not noted; it is the same object in all processes."""

    UNKNOWN = auto()


UNKNOWN = _Start.UNKNOWN
# Bytes of a value that is compared with what a resumed run is constructed with.
_LARGEST_START = 1 << 12


class Noted(NamedTuple):
    """A leaf as it was noted.

    Attributes:
        path: Its place.
        mark: Its kind and digest; None if it counts as changed in any case.
        identity: The identity of its value.
        start: The value before any hook, if it is small, so that a user may have passed it; else `UNKNOWN`.
    """

    path: Path
    mark: Any
    identity: int
    start: Any = UNKNOWN


class SavedValue(NamedTuple):
    """An entry under "values". Earlier versions have written neither of the last two items.

    Attributes:
        path: Its place.
        value: The value.
        is_elsewhere: Whether tensors in it were on another device than the CPU.
        was_replaced: Whether another object had been at this place.
        start: The value before any hook; `UNKNOWN` if the entry lacks it.
    """

    path: list[Any]
    value: Any
    is_elsewhere: bool
    was_replaced: bool = False
    start: Any = UNKNOWN


class SavedObject(NamedTuple):
    """An entry under "objects". Earlier versions have not written the last item.

    Attributes:
        path: Its place.
        description: What `description_of` says of what no file can hold, or of what is too large.
        was_replaced: Whether another one of its class had been at this place.
    """

    path: list[Any]
    description: str
    was_replaced: bool = False


def saved_values(state: State) -> Iterator[SavedValue]:
    """Return the entries under "values"; items of later versions are left out."""
    return (SavedValue(*entry[: len(SavedValue._fields)]) for entry in state.get("values", ()))


def saved_objects(state: State) -> Iterator[SavedObject]:
    """Return the entries under "objects"; items of later versions are left out."""
    return (SavedObject(*entry[: len(SavedObject._fields)]) for entry in state.get("objects", ()))


class PlainState:
    """Notes the state of objects, and tells what has changed since then.

    Tensors count as changed when they are written to or replaced; other values when they differ.

    Example:
        >>> import torch
        >>> from equipoise.parallel.snapshot.plain.restoring import restore
        >>> class Curriculum: level = 1
        >>> curriculum = Curriculum()
        >>> state = PlainState()
        >>> state.mark({"data": Root(curriculum)})
        >>> curriculum.level = 2
        >>> changes = state.changes({"data": Root(curriculum)})
        >>> changes["values"]
        [[['data', 'level'], 2, False, True]]
        >>> resumed = Curriculum()
        >>> restore({"data": Root(resumed)}, changes, torch.device("cpu"))
        >>> resumed.level
        2
    """

    def __init__(self) -> None:
        self._leaves = Leaves()
        # By paths as texts: a path may hold lists, which are no keys.
        self._noted: dict[str, Noted] = {}

    def mark(self, roots: Mapping[str, Root], *, with_starts: bool = True) -> None:
        """Note the present state of objects, by their names; with starts, if a resumed run constructs them likewise."""
        for leaf in self._leaves.of(roots):
            start = UNKNOWN
            # Tensors may be random numbers.
            may_be_argument = leaf.content.size <= _LARGEST_START and not leaf.content.has_tensors
            if with_starts and leaf.kind == "values" and may_be_argument:
                start = copied(leaf.value)
            self._noted[repr(leaf.path)] = Noted(leaf.path, leaf.mark, id(leaf.value), start)

    def mark_but_tensors(self, roots: Mapping[str, Root], changed: Collection[str] = ()) -> None:
        """Note the state anew; values with tensors that have changed since the mark still count as changed.

        Args:
            roots: The objects.
            changed: Paths of further values that count as changed, as `changed_paths` returns them. Default: none.
        """
        earlier = self._noted
        self._noted = {key: noted for key, noted in earlier.items() if noted.path[0] not in roots}
        for leaf in self._leaves.of(roots):
            key = repr(leaf.path)
            noted = earlier.get(key, Noted(leaf.path, None, 0))
            mark: Any = leaf.mark
            has_changed_tensors = leaf.content.has_tensors and noted.mark != mark
            if has_changed_tensors or key in changed:
                mark = None
            self._noted[key] = noted._replace(mark=mark, identity=id(leaf.value))

    def changed_paths(self, roots: Mapping[str, Root]) -> set[str]:
        """Return the paths of values that have changed since the mark, or are new, as texts."""
        keys = set()
        for leaf in self._leaves.of(roots):
            key = repr(leaf.path)
            noted = self._noted.get(key)
            if leaf.kind == "values" and (noted is None or noted.mark != leaf.mark):
                keys.add(key)
        return keys

    def changes(self, roots: Mapping[str, Root]) -> State:
        """Return what has changed since the mark, as copies on the CPU.

        Returns:
            Entries by kind: under "values" the items of `SavedValue`, without an unknown start; under "generators" the
            path and the state; under "aliases" the path and that of the same value; under "objects" the items of
            `SavedObject`; under "deleted" the path.
        """
        state: State = {"values": [], "generators": [], "aliases": [], "objects": [], "deleted": []}
        copies: Copies = {}
        replaced = set()
        lacking = {key: noted.path for key, noted in self._noted.items() if noted.path[0] in roots}
        for leaf in self._leaves.of(roots):
            key = repr(leaf.path)
            lacking.pop(key, None)
            noted = self._noted.get(key)
            if noted is not None and noted.mark == leaf.mark:
                continue
            # Files hold lists more readily than tuples.
            entry: list[Any] = [list(leaf.path)]
            if leaf.kind == "values":
                was_replaced = noted is None or noted.identity != id(leaf.value)
                entry += [copied(leaf.value, copies=copies), leaf.content.is_elsewhere, was_replaced]
                if noted is not None and noted.start is not UNKNOWN:
                    entry.append(noted.start)
            elif leaf.kind == "generators":
                entry.append(generator_state(leaf.value))
            elif leaf.kind == "aliases":
                entry.append(list(leaf.content.digest))
            else:
                was_replaced = noted is not None and _class_of(noted.mark) == _class_of(leaf.mark)
                entry += [description_of(leaf.value), was_replaced]
                replaced.add(key)
            state[leaf.kind].append(entry)
        # Few runs delete anything.
        if lacking:
            from equipoise.parallel.snapshot.plain.places import deleted

            state["deleted"] = deleted(roots, lacking.values(), replaced)
        return state

    def noted(self, path: list[Any]) -> Noted | None:
        """Return what was noted at a path; None if there was nothing."""
        return self._noted.get(repr(tuple(path)))

    def has_noted(self, path: list[Any], value: Any) -> bool:
        """Return whether this very value was at a path when that was noted."""
        noted = self.noted(path)
        return noted is not None and noted.identity == id(value)


def _class_of(mark: Any) -> Any:
    """Return what a mark has of an object's class."""
    if mark is None:
        return None
    _, digest = mark
    # That of a layer with weights has its number as well.
    return digest[0] if isinstance(digest, tuple) else digest
