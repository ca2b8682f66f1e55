"""Nested structures keep their types, their order and what else they hold, by every rule."""

from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import pytest
import torch

from equipoise.extensions.pipeline.graph.stages import plain_items
from equipoise.interop.torch import dispatch
from equipoise.tree import entries_of, items_of, leaves_of, map_leaves, rebuild, tensors_in
from tests.support.nested import Checked, Frozen, Pair, Sample


class Named(dict[str, Any]):
    """A dictionary with an attribute."""


class Rows(list[Any]):
    """A list of a class of its own."""


def test_entries_of_a_nested_batch_come_in_order() -> None:
    a, b, c, d, e = (torch.zeros(1) for _ in range(5))
    batch = [a, {"x": Pair(b, "text"), "y": UserDict(z=(c,))}, Sample(d), None, 3, e]
    assert [id(t) for _, t in entries_of(batch)] == [id(t) for t in (a, b, c, d, e)]
    assert [path for path, _ in entries_of(batch)] == ["[0]", "[1]['x'][0]", "[1]['y']['z'][0]", "[2].inner", "[5]"]
    assert [id(t) for t in tensors_in(batch)] == [id(t) for t in (a, b, c, d, e)]
    assert list(map(id, leaves_of(batch))) == list(map(id, [a, b, "text", c, d, "x", None, None, 3, e]))


def test_a_rebuilt_container_keeps_what_it_is() -> None:
    named = Named(a=1)
    named.origin = "here"
    made = rebuild(named, [2])
    assert (made, made.origin, named) == ({"a": 2}, "here", {"a": 1})
    assert rebuild(defaultdict(list, a=1), [2])["missing"] == []
    sample = Sample(1)
    assert vars(rebuild(sample, [4, "y", 6])) == {"inner": 4, "note": "y", "derived": 6}
    assert vars(sample) == {"inner": 1, "note": "x"}
    assert rebuild(Frozen(1), [2]) == Frozen(2)
    assert rebuild(MappingProxyType({"a": 1}), [2]) == {"a": 2}  # cannot be written to
    assert type(rebuild(torch.zeros(2).sort(), [1, 2])) is torch.return_types.sort
    checked = Checked(torch.ones(2))
    checked.note = "here"
    made = rebuild(checked, [None, "y"])
    assert (type(made), tuple(made), made.note) == (Checked, (None, "y"), "here")


def test_leaves_are_mapped_in_place_of_others() -> None:
    value = (1, [2, {"a": 3}], Pair(4, UserDict(b=5)), Sample(6, 7), Frozen(()))
    mapped = map_leaves(lambda leaf: None if leaf is None else -leaf, value)
    assert mapped == (-1, [-2, {"a": -3}], Pair(-4, UserDict(b=-5)), Sample(-6, -7), Frozen(()))
    assert type(mapped[2]) is Pair
    assert value[1] == [2, {"a": 3}]
    assert map_leaves(abs, -1) == 1
    assert map_leaves(str, Sample, items_of) == str(Sample)  # a class is no container


# The containers of each rule: of batches, of stages, of operations.
CONTAINERS = {
    "tuple": ((1,), "bso"),
    "named tuple": (Pair(1, 1), "bso"),
    "list": ([1], "bso"),
    "a list's subclass": (Rows([1]), "bo"),
    "Size": (torch.Size([1]), "o"),
    "dict": ({"a": 1}, "bso"),
    "ordered": (OrderedDict(a=1), "bso"),
    "defaultdict": (defaultdict(int, a=1), "bo"),
    "UserDict": (UserDict(a=1), "bo"),
    "dataclass": (Frozen(1), "b"),
    "deque": (deque([1]), "o"),
    "range": (range(1, 2), "o"),
    "text": ("1", ""),
    "set": ({1}, ""),
    "number": (1, ""),
}
RULES = {"b": items_of, "s": plain_items, "o": dispatch._items_of}


@pytest.mark.parametrize("name", CONTAINERS)
def test_each_rule_descends_into_its_own_containers(name: str) -> None:
    value, names = CONTAINERS[name]
    for rule, items in RULES.items():
        result: Iterable[Any] | None = items(value)
        if rule in names:
            assert set(result or ()) == {1}, rule
        else:
            assert result is None, rule
