"""The attributes of all members' modules, which have those of the first member when a step begins.

What the steps have set is found by comparing the values' identities, which takes a fraction of the time that setting
all attributes anew takes.
"""

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

from torch import nn

from equipoise.parallel.replicas.replica import Replica

__all__ = ["AttributesOfMembers", "NotedAttributes"]

AttributeDict = dict[str, Any]


class NotedAttributes:
    """Attributes of some modules, and their values when they were noted.

    Args:
        present: The attributes of each module.
        noted: The list of each module's noted values, which other objects may share.
    """

    def __init__(self, present: Sequence[AttributeDict], noted: Sequence[list[Any]]) -> None:
        self._present = present
        self._noted = noted

    def are_unchanged(self) -> bool:
        """Return True if every attribute is the object that was noted."""
        # `map` ends with the shorter of two lists.
        present_lengths = list(map(len, self._present))
        noted_lengths = list(map(len, self._noted))
        if present_lengths != noted_lengths:
            return False
        values = map(dict.values, self._present)
        present = chain.from_iterable(values)
        noted = chain.from_iterable(self._noted)
        return all(map(is_, present, noted))


class _Parts:
    """Some modules of all members.

    Args:
        indices: Their indices among the parts of a replica.
        attributes: For each of them, its attributes in each member.
        values: For each of them, the list of its noted values in each member.
        replicas: All members but the first.
    """

    def __init__(
        self,
        indices: Sequence[int],
        attributes: Sequence[list[AttributeDict]],
        values: Sequence[list[list[Any]]],
        replicas: Sequence[Replica],
    ) -> None:
        self._indices = indices
        self._replicas = replicas
        all_attributes = chain.from_iterable(attributes)
        self._attributes = list(all_attributes)
        all_values = chain.from_iterable(values)
        self._values = list(all_values)
        self._noted = NotedAttributes(self._attributes, self._values)
        self._last_names: list[str] = []

    def are_unchanged(self) -> bool:
        """Return True if all members have the attributes that the last refresh has given them."""
        first = self._replicas[0]
        have_new_items = map(first.may_have_new_items, self._indices)
        if any(have_new_items):
            return False
        if not self._noted.are_unchanged():
            return False
        return self._present_last_names() == self._last_names

    def refresh(self) -> None:
        """Give all members the attributes of the first one."""
        for replica in self._replicas:
            for index in self._indices:
                replica.refresh_part(index)
        pairs = zip(self._attributes, self._values, strict=True)
        for attributes, values in pairs:
            values.clear()
            values.extend(attributes.values())
        self.note_names()

    def note_names(self) -> None:
        """Note the names, after the attributes were refreshed."""
        self._last_names = self._present_last_names()

    def _present_last_names(self) -> list[str]:
        """Return the name of the last attribute in each module: a new attribute is always the last one."""
        backwards = map(reversed, self._attributes)
        names = map(next, backwards)
        return list(names)


class AttributesOfMembers:
    """The attributes of all members.

    Args:
        modules: The first member's module and all below it, without metrics.
        replicas: All other members.
    """

    def __init__(self, modules: Sequence[nn.Module], replicas: Sequence[Replica]) -> None:
        modules_of_members = [modules]
        for replica in replicas:
            modules_of_members.append(replica.copied_parts)
        # For each part, those of each member.
        self._attributes: list[list[AttributeDict]] = []
        self._values: list[list[list[Any]]] = []
        for column in zip(*modules_of_members, strict=True):
            attributes = [vars(module) for module in column]
            self._attributes.append(attributes)
            values: list[list[Any]] = [[] for _ in column]
            self._values.append(values)
        indices = range(len(modules))
        # One comparison of all of them is quicker; mostly all are as they were.
        self._all = _Parts(indices, self._attributes, self._values, replicas)
        self._parts = []
        for index in indices:
            attributes = self._attributes[index]
            values = self._values[index]
            part = _Parts([index], [attributes], [values], replicas)
            self._parts.append(part)

    def refresh(self) -> None:
        """Give all members the attributes of the first one, where any has others."""
        if self._all.are_unchanged():
            return
        for part in self._parts:
            if not part.are_unchanged():
                part.refresh()
        self._all.note_names()

    def of(self, member: int, parts: Sequence[int]) -> NotedAttributes:
        """Return the attributes of a member, as the last refresh has left them.

        Args:
            member: The index of the member.
            parts: Indices of the modules.
        """
        present = []
        noted = []
        for index in parts:
            attributes = self._attributes[index]
            values = self._values[index]
            present.append(attributes[member])
            noted.append(values[member])
        return NotedAttributes(present, noted)
