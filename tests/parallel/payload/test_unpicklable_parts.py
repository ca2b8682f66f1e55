"""The path to the part of an object that cannot be pickled."""

import threading
from functools import partial
from typing import Any

import pytest

from equipoise.parallel.payload.unpicklable_parts import find_unpicklable


class Holder:
    """Holds a part."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def run(self) -> None: ...


class Slotted:
    """Holds a part in a slot."""

    __slots__ = "part"
    __init__ = Holder.__init__


class Circle(Holder):
    """Holds itself before a part."""

    def __init__(self, part: Any) -> None:
        self.circle = self
        super().__init__(part)


class Closed(list[int]):
    """A container that cannot be pickled, though all of its items can."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a closed list")


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda part: [Holder(part)], "Holder.part"),
        (lambda part: Holder([0, part]), "Holder.part[1]"),
        (lambda part: Holder({"key": part}), "Holder.part['key']"),
        (lambda part: partial(print, part), "lock"),
        (lambda part: Slotted(part), "Slotted.part"),
        (lambda part: Holder(Holder(part).run), "Holder.part.part"),
        (lambda part: Circle(part), "Circle.part"),
        (lambda part: Holder({part}), "Holder.part{...}"),
    ],
)
def test_the_path_begins_with_the_first_object_of_the_user(wrap: Any, path: str) -> None:
    part = threading.Lock()
    found_path, found = find_unpicklable(wrap(part))
    assert (found_path, found) == (path, part)


def test_a_part_in_containers_alone_is_its_own_path() -> None:
    part = Closed([1])
    found_path, found = find_unpicklable([part])
    assert found_path == "Closed"
    assert found is part


def test_a_member_of_a_class_of_the_script() -> None:
    """A class of the script is sent with its members, so the path begins with the class."""
    part = threading.Lock()
    kind = type("OfTheScript", (), {"__module__": "__main__", "part": part})
    assert find_unpicklable(kind) == ("OfTheScript.part", part)
