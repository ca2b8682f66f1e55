"""State of objects as plain data: what has changed in them since a mark.

Objects are followed through their attributes and the items of their containers to leaves: plain values, generators, and
objects that a file cannot hold, of which only the class is noted. A leaf is known by the path that leads to it.
"""

from collections.abc import Mapping
from typing import Any

from equipoise.parallel.snapshot.generators import generator_state
from equipoise.parallel.snapshot.plain.copies import copied
from equipoise.parallel.snapshot.plain.leaves import Leaves
from equipoise.parallel.snapshot.plain.paths import Root

__all__ = ["PlainState", "State"]

# Entries of the changed leaves, by kind; each begins with the path.
State = dict[str, list[list[Any]]]


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
        [[['data', 'level'], 2, False]]
        >>> resumed = Curriculum()
        >>> restore({"data": Root(resumed)}, changes, torch.device("cpu"))
        >>> resumed.level
        2
    """

    def __init__(self) -> None:
        self._leaves = Leaves()
        # Marks of leaves, by their paths as texts: a path may hold lists, which are no keys.
        self._noted: dict[str, tuple[str, Any]] = {}

    def mark(self, roots: Mapping[str, Root]) -> None:
        """Note the present state of objects, by their names."""
        for leaf in self._leaves.of(roots):
            key = repr(leaf.path)
            self._noted[key] = leaf.mark

    def mark_but_tensors(self, roots: Mapping[str, Root]) -> None:
        """Note the state anew; values with tensors that have changed since the mark still count as changed."""
        for leaf in self._leaves.of(roots):
            key = repr(leaf.path)
            if not leaf.content.has_tensors:
                self._noted[key] = leaf.mark
            elif self._noted.get(key) != leaf.mark:
                # A leaf that is not noted has changed.
                self._noted.pop(key, None)

    def changes(self, roots: Mapping[str, Root]) -> State:
        """Return what has changed since the mark, as copies on the CPU.

        Returns:
            Under "values" paths, values, and whether tensors in them were on another device than the CPU; under
            "generators" paths and states; under "aliases" paths and those of the same values; under "objects" paths
            and names of classes, for what no file can hold or what is too large.
        """
        state: State = {"values": [], "generators": [], "aliases": [], "objects": []}
        for leaf in self._leaves.of(roots):
            if self._noted.get(repr(leaf.path)) == leaf.mark:
                continue
            # Files hold lists more readily than tuples.
            entry: list[Any] = [list(leaf.path)]
            if leaf.kind == "values":
                entry.append(copied(leaf.value))
                entry.append(leaf.content.is_elsewhere)
            elif leaf.kind == "generators":
                entry.append(generator_state(leaf.value))
            elif leaf.kind == "aliases":
                entry.append(list(leaf.value))
            else:
                entry.append(type(leaf.value).__qualname__)
            state[leaf.kind].append(entry)
        return state
